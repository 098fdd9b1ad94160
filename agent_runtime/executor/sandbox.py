"""Everything that lives in this executor: its workspaces with their processes and proxies, and the attempts they serve."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from agent_runtime.executor.attempts.attempts import Attempt
from agent_runtime.executor.attempts.fencing import Hold
from agent_runtime.executor.attempts.idempotency import Key, StoredReply
from agent_runtime.executor.commands.processes import CommandSpec, Process
from agent_runtime.executor.commands.streams import Streams
from agent_runtime.executor.errors import ApiError, translating
from agent_runtime.executor.host import WorkspaceFailure, WorkspaceSpec
from agent_runtime.executor.http.messages import Reply
from agent_runtime.executor.network.model_port import ModelPort
from agent_runtime.executor.network.proxy import PROXY_PORT, NetworkProxy, proxy_variables
from agent_runtime.executor.network.rules import NO_NETWORK, NetworkRule
from agent_runtime.executor.overlay.hosts import Host
from agent_runtime.executor.overlay.workspace import Workspace


class WorkspaceEntry:
    """One workspace. `made_by` is the request body that made it; `folder` takes the model requests that wait."""

    def __init__(self, attempt: str, made_by: dict[str, Any], workspace: Workspace, mode: str, folder: str) -> None:
        self.id, self.attempt, self.made_by = workspace.spec.id, attempt, made_by
        self.workspace = workspace
        self.is_frozen = False
        self.failure: WorkspaceFailure | None = None
        self.processes: dict[str, Process] = {}
        self._mode, self._folder = mode, folder
        self._rule = NO_NETWORK
        self._proxy: NetworkProxy | None = None
        self.model_port: ModelPort | None = None
        self._opening_model_port = asyncio.Lock()
        self.ending: asyncio.Task[None] | None = None
        workspace.failed.add_done_callback(self._on_failure)

    def require_live(self) -> None:
        """Raises WorkspaceFailed, Conflict, NotFound."""
        self.require_working()
        if self.is_frozen:
            raise ApiError("Conflict", f"workspace {self.id!r} is frozen: it can be read and forked, nothing else")

    def require_working(self) -> None:
        """Raises WorkspaceFailed, NotFound."""
        if self.failure is not None:
            message = f"workspace {self.id!r} has failed: {self.failure.message}"
            raise ApiError("WorkspaceFailed", message, cause=self.failure.cause)
        if self.ending is not None:
            raise ApiError("NotFound", f"workspace {self.id!r} is being destroyed")

    def describe(self) -> dict[str, Any]:
        """The workspace object of docs/executor.md."""
        failure = self.failure
        return {
            "id": self.id,
            "attempt": self.attempt,
            "mode": self._mode,
            "state": "Failed" if failure else "Frozen" if self.is_frozen else "Live",
            "failure": {"cause": failure.cause, "message": failure.message} if failure else None,
            "parent": self.workspace.spec.parent,
            "layers": self.workspace.layers(),
            "network": self._rule.as_json(),
            "modelPort": self.model_port.describe() if self.model_port else None,
            "usage": self.workspace.usage(),
            "processes": [
                {"id": process.id, "state": "Exited" if process.is_ended else "Running"}
                for process in self.processes.values()
            ],
        }

    def start(self, process: Process, env: Mapping[str, str], settled: Callable[[], None]) -> None:
        """Ask for a command to be started; `settled` is called when its start has succeeded or failed."""

        def note() -> None:
            if process.refusal is None:
                self.processes[process.id] = process
                if self.is_frozen or self.ending is not None or self.failure is not None:
                    process.abandon(self.failure.cause if self.failure else "WorkspaceEnded")
            settled()

        proxied = proxy_variables() if self._proxy is not None and self._rule.kind != "None" else {}
        process.start(self.workspace, {**proxied, **self.workspace.spec.env, **env}, note)

    async def switch_network(self, rule: NetworkRule) -> None:
        """Go on to the next phase, in which the model port is closed. Raises FileError, WorkspaceFailed."""
        self._close_model_port()
        if self._proxy is None and rule.kind != "None":
            with translating(missing_is_not_found=False):
                listener = await self.workspace.listen(PROXY_PORT)
            if listener is not None:
                self._proxy = NetworkProxy(rule)
                await self._proxy.start(listener)
        if self._proxy is not None:
            self._proxy.switch(rule)
        self._rule = rule

    async def open_model_port(self) -> ModelPort:
        """The model port, which stays open until the next phase. Raises FileError, WorkspaceFailed, NotFound, Conflict."""
        async with self._opening_model_port:
            if self.model_port is None:
                with translating(missing_is_not_found=False):
                    # Any free one: in `Plain` the machine's other programs have theirs, in `Overlay` the workspace's own.
                    descriptor = await self.workspace.listen(0)
                # What has no network of its own shares the executor's.
                shared = descriptor is None
                listener = socket.create_server(("127.0.0.1", 0)) if shared else socket.socket(fileno=descriptor)
                port = await ModelPort.open(listener, self._folder)
                try:
                    self.require_live()
                except ApiError:
                    port.close()
                    raise
                self.model_port = port
            return self.model_port

    async def freeze(self) -> None:
        """End its processes; from now on it is a layer. Raises Conflict, WorkspaceFailed."""
        if self._mode == "Plain":
            raise ApiError("Conflict", "a Plain workspace is the sandbox's own root: it cannot be frozen or forked")
        self.is_frozen = True
        self._stop("WorkspaceEnded")
        try:
            with translating():
                await self.workspace.freeze()
        except ApiError:
            self.is_frozen = False
            raise

    async def end_processes(self) -> None:
        """Kill everything in it, what no command is known for included. Raises WorkspaceFailed."""
        with translating():
            await self.workspace.end_processes("Signal")

    async def destroy(self) -> None:
        """End it with all that is in it."""
        self._stop("WorkspaceEnded")
        await self.workspace.destroy()
        for process in self.processes.values():
            process.discard()

    def forget_processes(self, turn: int) -> None:
        """Forget those of earlier turns that have ended and left nothing behind that still speaks."""
        for process in [process for process in self.processes.values() if process.turn < turn and process.is_silent]:
            process.discard()
            del self.processes[process.id]

    def _on_failure(self, failed: asyncio.Future[WorkspaceFailure]) -> None:
        if not failed.cancelled() and self.ending is None:
            self.failure = failed.result()
            self._stop(self.failure.cause)

    def _stop(self, cause: str) -> None:
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        self._close_model_port()
        for process in self.processes.values():
            process.abandon(cause)

    def _close_model_port(self) -> None:
        if self.model_port is not None:
            self.model_port.close()
            self.model_port = None


class Sandbox:
    """The executor's whole state. `folder` is its own part of the state folder."""

    def __init__(self, host: Host, folder: str) -> None:
        self.host = host
        self.activity = Activity()
        self.attempts: dict[str, Attempt] = {}
        self.workspaces: dict[str, WorkspaceEntry] = {}
        self._folder = folder
        self._numbers = itertools.count()
        self._being_made: set[str] = set()
        self._streams = Streams()

    def free_places(self) -> int:
        """How many more workspaces may live now."""
        taken = sum(not entry.is_frozen and entry.failure is None for entry in self.workspaces.values())
        return max(0, self.host.places - taken - len(self._being_made))

    def workspace(self, workspace_id: str) -> WorkspaceEntry:
        """Raises NotFound."""
        entry = self.workspaces.get(workspace_id)
        if entry is None:
            raise ApiError("NotFound", f"workspace {workspace_id!r} does not exist here")
        return entry

    def owned_workspace(self, workspace_id: str, attempt: str) -> WorkspaceEntry:
        """A workspace to change. Raises NotFound, and Conflict when it is another attempt's."""
        entry = self.workspace(workspace_id)
        if entry.attempt != attempt:
            raise ApiError(
                "Conflict", f"workspace {workspace_id!r} belongs to attempt {entry.attempt!r}, not {attempt!r}"
            )
        return entry

    def fenced_attempt(self, attempt_id: str, hold: Hold) -> Attempt:
        """An attempt that `hold` holds. Raises Fenced."""
        attempt = self.attempts.get(attempt_id) or Attempt(attempt_id)
        attempt.fence.require(hold)
        return attempt

    def attempt(self, attempt_id: str) -> Attempt:
        """An attempt, new or known. Attempts are remembered for good, so that an old runner stays fenced; 1 KiB each."""
        return self.attempts.setdefault(attempt_id, Attempt(attempt_id))

    async def create(
        self, attempt: str, made_by: dict[str, Any], spec: WorkspaceSpec, rule: NetworkRule
    ) -> WorkspaceEntry:
        """Make a workspace. Raises NoPlace, NotFound, Conflict, FileError, WorkspaceFailed."""
        known = self.workspaces.get(spec.id)
        if known is not None and known.ending is None and (known.attempt, known.made_by) == (attempt, made_by):
            return known
        if known is not None or spec.id in self._being_made:
            raise ApiError(
                "Conflict", f"workspace {spec.id!r} exists already, with another content or of another attempt"
            )
        if spec.parent is not None:
            parent = self.workspace(spec.parent)
            parent.require_working()
            if not parent.is_frozen:
                raise ApiError(
                    "Conflict", f"parent {spec.parent!r} is not frozen; only a frozen workspace can be forked"
                )
        if not self.free_places():
            places = {"total": self.host.places, "free": 0}
            raise ApiError(
                "NoPlace", f"all {self.host.places} places are taken; freeze or delete a workspace", places=places
            )
        self._being_made.add(spec.id)
        try:
            with translating(missing_is_not_found=False):
                workspace = await self.host.create(spec)
        finally:
            self._being_made.discard(spec.id)
        entry = self.workspaces[spec.id] = WorkspaceEntry(attempt, made_by, workspace, self.host.mode, self._folder)
        try:
            await entry.switch_network(rule)
        except ApiError:
            await self.destroy(entry)
            raise
        return entry

    async def destroy(self, entry: WorkspaceEntry) -> None:
        """Destroy a workspace; a second call joins the first. Raises Conflict while another one lies on top of it."""
        above = [other.id for other in self.workspaces.values() if entry.id in other.workspace.layers()]
        if above:
            raise ApiError(
                "Conflict", f"workspace {entry.id!r} is a layer below {', '.join(sorted(above))}; delete these first"
            )
        if entry.ending is None:
            entry.ending = asyncio.get_running_loop().create_task(entry.destroy())
        await asyncio.shield(entry.ending)
        self.workspaces.pop(entry.id, None)

    def detach_runners(self, attempt: str, hold: Hold) -> None:
        """Cut the connections by which runners before `hold` serve the attempt's model ports."""
        for entry in self.workspaces.values():
            if entry.attempt == attempt and entry.model_port is not None:
                entry.model_port.detach_all_but(hold)

    async def delete_attempt(self, attempt_id: str) -> None:
        """Destroy an attempt's workspaces, the uppermost first. Raises Conflict as `destroy` does."""
        owned = [entry for entry in self.workspaces.values() if entry.attempt == attempt_id]
        for entry in sorted(owned, key=lambda entry: -len(entry.workspace.layers())):
            await self.destroy(entry)

    def acknowledge(self, attempt: Attempt, turn: int) -> None:
        """Forget the keys and ended processes of an attempt's turns below `turn`."""
        attempt.keys.forget_below(turn)
        for entry in self.workspaces.values():
            if entry.attempt == attempt.id:
                entry.forget_processes(attempt.keys.watermark)

    def start(
        self, workspace_id: str, attempt: str, key: Key, spec: CommandSpec, settled: Callable[[], None]
    ) -> Process:
        """Ask for a command to be started; `settled` is called when its start has succeeded or failed.

        Raises NotFound, Conflict, WorkspaceFailed.
        """
        entry = self.owned_workspace(workspace_id, attempt)
        entry.require_live()
        process = Process(key.process_id(), key.turn, spec, self._streams, self._path("output"))
        entry.start(process, spec.env, settled)
        return process

    def stored(self, reply: Reply) -> StoredReply:
        """A reply to remember."""
        return StoredReply(reply, self._path("reply"))

    async def close(self) -> None:
        """Destroy everything but the host."""
        for entry in self.workspaces.values():
            entry.ending = entry.ending or asyncio.get_running_loop().create_task(entry.destroy())
        await asyncio.gather(*(h.ending for h in self.workspaces.values() if h.ending), return_exceptions=True)
        self._streams.close()
        empty(self._folder)

    def _path(self, kind: str) -> str:
        return f"{self._folder}/{next(self._numbers)}-{kind}"


class Activity:
    """Counts what is being done for callers who have shown the token: an executor that is idle for long ends itself."""

    def __init__(self) -> None:
        self.at_work = 0
        self.last = time.monotonic()

    def begin(self) -> None:
        """A request, or a command that somebody waits for, begins."""
        self.at_work += 1

    def end(self) -> None:
        """It has been answered, or its caller has gone."""
        self.at_work -= 1
        self.last = time.monotonic()


def empty(folder: str) -> None:
    """Remove the files of a folder of our own."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            os.unlink(entry.path)
