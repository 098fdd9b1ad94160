"""The executor's state: its workspaces with their processes and proxies, and its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any

from agent_runtime.executor.attempts import Attempt, Hold, Key, Stillness, StoredReply
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
from agent_runtime.executor.timing import stood_still


class WorkspaceEntry:
    """One workspace. `made_by` is the request body that created it; `folder` holds waiting model requests."""

    def __init__(self, attempt: str, made_by: dict[str, Any], workspace: Workspace, mode: str, folder: str) -> None:
        self.id, self.attempt, self.made_by = workspace.spec.id, attempt, made_by
        self.workspace = workspace
        self.is_freezing = False
        """Whether it accepts no changes any more, because it is being frozen or is frozen."""
        self.failure: WorkspaceFailure | None = None
        self.processes: dict[str, Process] = {}
        self._mode, self._folder = mode, folder
        self._stood_still_before = stood_still()
        self._rule = NO_NETWORK
        self._proxy: NetworkProxy | None = None
        self.model_port: ModelPort | None = None
        self._opening_model_port = asyncio.Lock()
        self.ending: asyncio.Task[None] | None = None
        workspace.failed.add_done_callback(self._on_failure)
        workspace.ports = self

    @property
    def is_frozen(self) -> bool:
        """Whether others can start from it."""
        return self.workspace.frozen

    @property
    def uses_place(self) -> bool:
        """Whether it counts as one of the sandbox's places; one that joins another uses that one's."""
        return not self.is_frozen and self.workspace.spec.joins is None

    def require_live(self) -> None:
        """Raise WorkspaceFailed, Conflict or NotFound unless the workspace is live."""
        self.require_working()
        if self.is_freezing:
            raise ApiError("Conflict", f"workspace {self.id!r} is frozen: it can only be read and forked")

    def require_working(self) -> None:
        """Raise WorkspaceFailed or NotFound if the workspace has failed or is being destroyed."""
        if self.failure is not None:
            message = f"workspace {self.id!r} has failed: {self.failure.message}"
            raise ApiError("WorkspaceFailed", message, cause=self.failure.cause)
        if self.ending is not None:
            raise ApiError("NotFound", f"workspace {self.id!r} is being destroyed")

    def describe(self) -> dict[str, Any]:
        """Return the workspace object of docs/executor.md."""
        failure = self.failure
        return {
            "id": self.id,
            "attempt": self.attempt,
            "mode": self._mode,
            "state": "Failed" if failure else "Frozen" if self.is_frozen else "Live",
            "resting": self.workspace.is_resting,
            "failure": {"cause": failure.cause, "message": failure.message} if failure else None,
            "parent": self.workspace.spec.parent,
            "layers": self.workspace.layers(),
            "network": self._rule.as_json(),
            "modelPort": self.model_port.describe() if self.model_port else None,
            "stoodStill": stood_still() - self._stood_still_before,
            "usage": self.workspace.usage(),
            "processes": [
                {"id": process.id, "state": "Exited" if process.is_ended else "Running"}
                for process in self.processes.values()
            ],
        }

    def start(self, process: Process, env: Mapping[str, str], settled: Callable[[], None]) -> None:
        """Request the start of a command; `settled` is called when its start has succeeded or failed."""

        def note() -> None:
            if process.refusal is None:
                self.processes[process.id] = process
                if self.is_freezing or self.ending is not None or self.failure is not None:
                    process.abandon(self.failure.cause if self.failure else "WorkspaceEnded")
            settled()

        proxied = proxy_variables() if self._proxy is not None and self._rule.kind != "None" else {}
        process.start(self.workspace, {**proxied, **self.workspace.spec.env, **env}, note)

    async def switch_network(self, rule: NetworkRule) -> None:
        """Switch to the next phase, which closes the model port. Raises FileError, WorkspaceFailed."""
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

    async def check_network(self) -> dict[str, Any]:
        """Return the phase's network, and what `NetworkProxy.check_failed` finds."""
        return {"network": self._rule.as_json(), "failed": await self._proxy.check_failed() if self._proxy else {}}

    @property
    def may_be_closed(self) -> bool:
        """Whether no program waits for an answer at one of its ports."""
        return self.model_port is None and not self._opening_model_port.locked()

    def close_ports(self) -> None:
        """Close its ports, because its network ends while it rests."""
        if self._proxy is not None:
            self._proxy.pause()

    async def open_ports(self, listen: Callable[[int], Awaitable[int | None]]) -> None:
        """Open its ports again, in its new network. Raises FileFailure, WorkspaceFailure."""
        if self._proxy is not None and (listener := await listen(PROXY_PORT)) is not None:
            await self._proxy.start(listener)

    async def open_model_port(self) -> ModelPort:
        """Return the model port, which stays open until the next phase. Raises FileError, WorkspaceFailed, NotFound,
        Conflict.
        """
        async with self._opening_model_port:
            if self.model_port is None:
                with translating(missing_is_not_found=False):
                    # Any free port: other programs of the machine (`Plain`) or of the workspace (`Overlay`) may use any
                    # fixed one.
                    descriptor = await self.workspace.listen(0)
                # Without its own network namespace, the workspace shares the executor's.
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
        """End its processes and make it a layer. Raises Conflict, WorkspaceFailed."""
        if self._mode == "Plain":
            raise ApiError("Conflict", "a Plain workspace is the sandbox's own root: it cannot be frozen or forked")
        self.is_freezing = True
        self._stop("WorkspaceEnded")
        try:
            with translating():
                await self.workspace.freeze()
        except ApiError:
            self.is_freezing = False
            raise

    async def end_processes(self, cause: str) -> None:
        """Kill all its processes, including daemons of commands that have ended. Commands end with `cause`.

        Raises WorkspaceFailed.
        """
        with translating():
            await self.workspace.end_processes(cause)

    async def destroy(self) -> None:
        """Destroy the workspace and all its processes."""
        self._stop("WorkspaceEnded")
        await self.workspace.destroy()
        for process in self.processes.values():
            process.discard()

    def forget_processes(self, turn: int) -> None:
        """Forget processes of earlier turns that have ended and whose streams are closed."""
        for process in [process for process in self.processes.values() if process.turn < turn and process.is_complete]:
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


def _rollout_of(workspace: str) -> str | None:
    """Return the rollout in a workspace's id, `ROLLOUT.NAME`; None for prepared states and layers, which have no dot."""
    rollout, dot, _ = workspace.partition(".")
    return rollout if dot else None


def _continues(spec: WorkspaceSpec) -> bool:
    """Whether it is a fork of a checkpoint of the same rollout."""
    if spec.parent is None:
        return False
    rollout = _rollout_of(spec.id)
    return rollout is not None and rollout == _rollout_of(spec.parent)


class Sandbox:
    """The executor's whole state. `folder` is its own part of the state folder."""

    def __init__(self, host: Host, folder: str) -> None:
        self.host = host
        self.activity = Activity()
        self.attempts: dict[str, Attempt] = {}
        self.workspaces: dict[str, WorkspaceEntry] = {}
        self.is_draining = False
        self.stillness = Stillness()
        self._least_parking = 0
        """Number of the first parking that is not over."""
        self.uses = 0
        """Number of workspaces created so far, without those that join another."""
        self._folder = folder
        self._numbers = itertools.count()
        self._being_made: set[str] = set()
        self._streams = Streams()

    def rollouts(self) -> int:
        """Return how many rollouts have workspaces here, also frozen ones alone, which are their checkpoints."""
        return len({rollout for rollout in map(_rollout_of, self.workspaces) if rollout is not None})

    def live(self) -> int:
        """Return how many rollouts still need this sandbox: workspaces that are neither frozen, joined nor deleted.

        Failed ones count, because their runners still read why.
        """
        return sum(entry.uses_place for entry in self.workspaces.values()) + len(self._being_made)

    def free_places(self) -> int:
        """Return how many more workspaces may exist now."""
        taken = sum(entry.uses_place and entry.failure is None for entry in self.workspaces.values())
        return max(0, self.host.places - taken - len(self._being_made))

    def idle_seconds(self) -> float:
        """Return for how long no request was at work and no command ran."""
        if self.activity.at_work or any(attempt.is_at_work for attempt in self.attempts.values()):
            return 0.0
        processes = (process for entry in self.workspaces.values() for process in entry.processes.values())
        last = max([self.activity.last, *(process.last_alive for process in processes)])
        return max(0.0, asyncio.get_running_loop().time() - last)

    def workspace(self, workspace_id: str) -> WorkspaceEntry:
        """Return a workspace. Raises NotFound."""
        entry = self.workspaces.get(workspace_id)
        if entry is None:
            raise ApiError("NotFound", f"workspace {workspace_id!r} does not exist here")
        return entry

    def owned_workspace(self, workspace_id: str, attempt: str) -> WorkspaceEntry:
        """Return a workspace for changes. Raises NotFound, and Conflict if it belongs to another attempt."""
        entry = self.workspace(workspace_id)
        if entry.attempt != attempt:
            raise ApiError(
                "Conflict", f"workspace {workspace_id!r} belongs to attempt {entry.attempt!r}, not {attempt!r}"
            )
        return entry

    def fenced_attempt(self, attempt_id: str, hold: Hold) -> Attempt:
        """Return an attempt that `hold` holds. Raises Fenced."""
        attempt = self.attempts.get(attempt_id) or Attempt(attempt_id, self.stillness)
        attempt.fence.require(hold)
        return attempt

    def attempt(self, attempt_id: str) -> Attempt:
        """Return an attempt; create it if it is new. Attempts are never forgotten, so that old runners stay fenced;
        each uses about 1 KiB.
        """
        return self.attempts.setdefault(attempt_id, Attempt(attempt_id, self.stillness))

    async def set_still(self, is_still: bool, parking: int, if_idle_seconds: float, restorer: str = "") -> None:
        """For this parking, refuse every change from now on and end all processes; or end the parking, and accept changes
        again. Returns when no change is in progress.

        A `restorer` is a holder that brings a parked sandbox back. What earlier restorers have made is destroyed, and only
        changes of this one are accepted until it ends the parking. Earlier ones that still run can change nothing.

        Raises Conflict if the parking is over, because it was ended or there is a later one; if another restorer has
        begun; and if it would become still, but was used less than `if_idle_seconds` ago.
        """
        now = self.stillness
        is_over = parking < self._least_parking
        if is_over and (is_still or now.is_on):
            raise ApiError("Conflict", f"parking {parking} is over: use number {self._least_parking} or a later one")
        if not is_still and now.restorer:
            self._require_restorer(restorer)
        if is_still and not now.is_on and (idle := self.idle_seconds()) < if_idle_seconds:
            message = f"it has been idle for {idle:.1f} s, less than {if_idle_seconds:g} s (ifIdleSeconds)"
            raise ApiError("Conflict", message, idleSeconds=idle)
        self._least_parking = max(self._least_parking, parking if is_still else parking + 1)
        now.is_on, now.restorer = is_still, restorer if is_still else ""
        if not is_still:
            self.activity.restart()
        if is_still:
            await self._end_processes()
            await asyncio.gather(*(attempt.settled() for attempt in list(self.attempts.values())))
            await self._end_processes()  # of commands that were being started
        if is_still and restorer:
            self._require_restorer(restorer)
            made = self._uppermost_first({entry.attempt for entry in self.workspaces.values()})
            self.attempts.clear()
            for entry in made:
                await self.destroy(entry)

    def _require_restorer(self, restorer: str) -> None:
        if self.stillness.restorer != restorer:
            raise ApiError("Conflict", "another try brings the Sandbox back: this one must end")

    async def _end_processes(self) -> None:
        live = [entry for entry in self.workspaces.values() if not entry.is_freezing and entry.failure is None]
        # A workspace that does not answer has failed with this call, and is reported as such.
        await asyncio.gather(*(entry.end_processes("Parked") for entry in live), return_exceptions=True)

    async def create(
        self, attempt: str, made_by: dict[str, Any], spec: WorkspaceSpec, rule: NetworkRule
    ) -> WorkspaceEntry:
        """Create a workspace. Raises NoPlace, NotFound, Conflict, FileError, WorkspaceFailed."""
        known = self.workspaces.get(spec.id)
        if known is not None and known.ending is None and (known.attempt, known.made_by) == (attempt, made_by):
            return known
        if known is not None or spec.id in self._being_made:
            raise ApiError(
                "Conflict", f"workspace {spec.id!r} exists already, with another specification or in another attempt"
            )
        if spec.parent is not None:
            parent = self.workspace(spec.parent)
            parent.require_working()
            if not parent.is_frozen:
                raise ApiError(
                    "Conflict", f"parent {spec.parent!r} is not frozen; only a frozen workspace can be forked"
                )
        if spec.joins is not None:
            self.workspace(spec.joins).require_live()
        elif self.is_draining and not _continues(spec):
            raise ApiError(
                "NoPlace",
                "the sandbox is draining and accepts no new workspaces; use another sandbox",
                places={"total": self.host.places, "free": 0},
            )
        elif not self.free_places():
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
        self.uses += entry.uses_place
        try:
            await entry.switch_network(rule)
        except ApiError:
            await self.destroy(entry)
            raise
        return entry

    async def destroy(self, entry: WorkspaceEntry) -> None:
        """Destroy a workspace; a second call joins the first. Raises Conflict while another one is based on it."""
        above = [other.id for other in self.workspaces.values() if entry.id in other.workspace.layers()]
        if above:
            raise ApiError(
                "Conflict", f"workspace {entry.id!r} is a parent of {', '.join(sorted(above))}; delete these first"
            )
        if entry.ending is None:
            entry.ending = asyncio.get_running_loop().create_task(entry.destroy())
        await asyncio.shield(entry.ending)
        self.workspaces.pop(entry.id, None)

    def detach_runners(self, attempt: str, hold: Hold) -> None:
        """Close the connections through which runners before `hold` serve the attempt's model ports."""
        for entry in self.workspaces.values():
            if entry.attempt == attempt and entry.model_port is not None:
                entry.model_port.detach_all_but(hold)

    async def delete_attempt(self, attempt_id: str) -> None:
        """Destroy an attempt's workspaces, the uppermost first. Raises Conflict as `destroy` does."""
        for entry in self._uppermost_first({attempt_id}):
            await self.destroy(entry)

    async def delete_attempts(self, prefix: str) -> int:
        """End the attempts whose ids start with `prefix`, whoever holds them; return how many are gone with this call.

        A layer below other attempts' workspaces stays, and its attempt does not count.
        """

        async def nothing() -> None: ...

        found = [attempt for attempt in self.attempts.values() if attempt.id.startswith(prefix)]
        owners = {entry.attempt for entry in self.workspaces.values()}
        ids = {attempt.id for attempt in found if not attempt.is_deleted or attempt.id in owners}
        # An attempt's call in progress may create a workspace above another one's.
        await asyncio.gather(*(attempt.end(nothing) for attempt in found))
        for entry in self._uppermost_first(ids):
            with contextlib.suppress(ApiError):  # it is a parent
                await self.destroy(entry)
        return len(ids - {entry.attempt for entry in self.workspaces.values()})

    def _uppermost_first(self, attempts: Set[str]) -> list[WorkspaceEntry]:
        owned = [entry for entry in self.workspaces.values() if entry.attempt in attempts]
        return sorted(owned, key=lambda entry: -len(entry.workspace.layers()))

    def acknowledge(self, attempt: Attempt, turn: int) -> None:
        """Forget the keys and ended processes of an attempt's turns below `turn`."""
        attempt.keys.forget_below(turn)
        for entry in self.workspaces.values():
            if entry.attempt == attempt.id:
                entry.forget_processes(attempt.keys.watermark)

    def start(
        self, workspace_id: str, attempt: str, key: Key, spec: CommandSpec, settled: Callable[[], None]
    ) -> Process:
        """Request the start of a command; `settled` is called when its start has succeeded or failed.

        Raises NotFound, Conflict, WorkspaceFailed.
        """
        entry = self.owned_workspace(workspace_id, attempt)
        entry.require_live()
        process = Process(key.process_id(), key.turn, spec, self._streams, self._path("output"))
        entry.start(process, spec.env, settled)
        return process

    def stored(self, reply: Reply) -> StoredReply:
        """Return a reply in the form in which it is remembered."""
        return StoredReply(reply, self._path("reply"))

    async def close(self) -> None:
        """Destroy everything except the host."""
        for entry in self.workspaces.values():
            entry.ending = entry.ending or asyncio.get_running_loop().create_task(entry.destroy())
        await asyncio.gather(*(h.ending for h in self.workspaces.values() if h.ending), return_exceptions=True)
        self._streams.close()
        empty(self._folder)

    def _path(self, kind: str) -> str:
        return f"{self._folder}/{next(self._numbers)}-{kind}"


class Activity:
    """Counts operations of authenticated callers. An executor that is idle for long ends itself."""

    def __init__(self) -> None:
        self.at_work = 0
        self.last = asyncio.get_running_loop().time()
        self.limit_seconds: float | None = None
        """Idle time that the last request allowed, if it did."""
        self.limited = asyncio.Event()
        """Set when the idle time must be computed again."""

    def begin(self) -> None:
        """Begin a request, or a command whose caller waits."""
        self.at_work += 1
        self.limit_seconds = None

    def limit(self, seconds: float) -> None:
        """Limit the idle time until the next request."""
        self.limit_seconds = seconds
        self.limited.set()

    def restart(self) -> None:
        """Have the idle time count from now."""
        self.last = asyncio.get_running_loop().time()
        self.limited.set()

    def end(self) -> None:
        """End the request: it was answered, or its caller has disconnected."""
        self.at_work -= 1
        self.last = asyncio.get_running_loop().time()


def empty(folder: str) -> None:
    """Remove the files of one of our folders."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            os.unlink(entry.path)
