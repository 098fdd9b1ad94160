"""A workspace reached through an executor, as all providers except the in-memory one return it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Unpack

from aiohttp import web

from agent_runtime.sandboxes.base import (
    DISK_FULL,
    OOM_KILLED,
    SANDBOX_MEMORY,
    Ancestors,
    Carried,
    CommandResult,
    Fence,
    Fenced,
    FileError,
    FileStat,
    Output,
    ProcessStatus,
    RunOptions,
    SandboxFailure,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.sandboxes.executor_client.client import (
    LIMIT_CAUSES,
    ExecutorClient,
    ExecutorRefusal,
    Hold,
    MissingFile,
    Query,
    Reply,
    disk_full,
    reason_of_loss,
)
from agent_runtime.sandboxes.executor_client.connection import Body
from agent_runtime.sandboxes.executor_client.model_port import serve_model
from agent_runtime.sandboxes.executor_client.values import bytes_of, file_stat, limits_of, not_started
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN
from agent_runtime.sandboxes.services import without_proxy
from rollout_api.sandbox import NetworkAccess, Phase

# Longest wait for output in one request, because proxies and NAT tables close connections that are silent for a minute.
WAIT_SECONDS = 25.0
# Errors of an invalid request. Its content came from the model, so they fail the tool call, not the sandbox.
REQUEST_REFUSALS = frozenset({"BadRequest", "TooLarge"})
# Output caps of a process that outlives its call: the status has no head, and the whole output can be read again.
KEPT_TAIL_BYTES = 32 << 10
KEPT_OUTPUT_BYTES = 256 << 20
# Processes that are paused continue so long after the last sign of their runner.
PAUSE_SECONDS = 10.0


@contextlib.contextmanager
def _refusals_of(what: str, *others: str) -> Iterator[None]:
    """Convert errors of an invalid request into FileError, because the model chose its content."""
    try:
        yield
    except ExecutorRefusal as refusal:
        if refusal.reason not in (*REQUEST_REFUSALS, *others):
            raise
        raise FileError(what, refusal.message) from refusal


def _owned(owner: str | None) -> Query:
    return [] if owner is None else [("owner", owner)]


class ExecutorWorkspace:
    """Implements `Workspace` over an ExecutorClient.

    The provider completes `handle`, because only it knows how to find the executor again. Until `enter` is called the
    workspace reaches no network.
    """

    def __init__(
        self,
        client: ExecutorClient,
        hold: Hold,
        spec: WorkspaceSpec,
        *,
        handle: Mapping[str, Any],
        description: Mapping[str, Any],
        end: Callable[[], Awaitable[None]] | None = None,
        discard: Callable[[str], Awaitable[None]] | None = None,
        forked: Callable[[str, str], Awaitable[ExecutorWorkspace]] | None = None,
        services: Callable[[], Mapping[str, ExecutorWorkspace]] = dict,
    ) -> None:
        self.handle, self.description = handle, description
        self.working_dir = spec.working_dir
        self.alone = spec.alone or description.get("mode") == "Plain"
        self.name = hold.attempt  # each workspace is a separate attempt at the executor
        self._client, self._hold, self._spec = client, hold, spec
        self._path = f"/workspaces/{self.name}"
        self._end, self._discard, self._forked, self._services = end, discard, forked, services

    async def create(
        self, parent: str | None, environment: Mapping[str, str], *, joins: ExecutorWorkspace | None = None
    ) -> None:
        """Create the workspace on top of the frozen workspace `parent`; may be repeated.

        `environment` is the provider's. With `joins`, it shares network and volumes of that one, whose service it is.

        Raises SandboxFailure("NoPlace") among others.
        """
        await self.fence()
        body = {
            "id": self.name,
            "parent": parent,
            "bare": parent is None and self._spec.is_bare,
            "joins": None if joins is None else joins.name,
            "shares": bool(self._spec.services),
            "volumes": dict(self._spec.volumes),
            "limits": {**limits_of(self._spec.limits), "leavesFree": self._spec.is_build},
            "env": {**without_proxy(self._spec.services or self._spec.prepares_for), **environment, **self._spec.env},
            "user": self._spec.user,
            "workingDir": self._spec.working_dir,
            "network": "None",
        }
        await self._change("POST", "/workspaces", f"{LIFECYCLE_TURN}:create", json_body=body)

    async def fence(self) -> None:
        """Raise the fence of its attempt at the executor. Raises Fenced if a newer one is current."""
        fence: Fence = self._hold.fence
        await self._client.call(
            "PUT",
            f"/attempts/{self._hold.attempt}/fence",
            hold=self._hold,
            json_body={"epoch": fence.epoch, "holder": fence.holder},
        )

    async def require_live(self, *, or_frozen: bool = False) -> None:
        """Raise SandboxFailure or WorkspaceLimit unless the workspace exists and works."""
        state = (await self._read(self._path)).json()
        if state["state"] == "Live" or (or_frozen and state["state"] == "Frozen"):
            return
        failure = state.get("failure") or {}
        if failure.get("cause") in LIMIT_CAUSES:
            raise WorkspaceLimit(failure["cause"], str(failure.get("message", "")))
        why = failure.get("message") or f"workspace {self.name} is {state['state']}"
        raise SandboxFailure(reason_of_loss(failure.get("cause")), str(why))

    def silence(self, pausing: Callable[[bool], None]) -> AbstractContextManager[None]:
        """See Checkable."""
        return self._client.silence.watched(pausing)

    async def is_frozen(self) -> bool:
        """Whether the workspace exists and is frozen."""
        try:
            return bool((await self._read(self._path)).json()["state"] == "Frozen")
        except SandboxFailure:
            return False

    async def freeze(self) -> None:
        await self._change("POST", f"{self._path}/freeze", f"{LIFECYCLE_TURN}:freeze")

    async def fork(self, name: str, *, of: str | None = None) -> ExecutorWorkspace:
        if self._forked is None:
            raise SandboxFailure("ProviderUnavailable", f"workspace {self.name} is used by hand and cannot be forked")
        return await self._forked(name, of or self.name)

    async def discard(self, other: str) -> None:
        if self._discard is not None:
            with contextlib.suppress(SandboxFailure):
                await self._discard(other)

    async def run(
        self, command: str | Sequence[str], *, key: str, deadline_seconds: float, **how: Unpack[RunOptions]
    ) -> CommandResult:
        """See Workspace. A command that cannot be started has cause `NotStarted`, with the reason as its stderr."""
        try:
            answer = await self._client.run(
                self._hold, self.name, key, command, deadline_seconds=deadline_seconds, **how
            )
        except (FileError, ValueError) as error:
            return not_started(str(error))
        except ExecutorRefusal as refusal:
            if refusal.reason in REQUEST_REFUSALS:
                return not_started(refusal.message)
            raise
        if answer.cause in ("Memory", "Disk"):
            raise WorkspaceLimit(answer.cause, f"the command used up the {answer.cause.lower()} of its workspace")
        if answer.cause == DISK_FULL:
            raise disk_full(f"command {key} of {self.name}")
        if answer.cause in ("WorkspaceEnded", "Attacked", SANDBOX_MEMORY, OOM_KILLED):
            await self.require_live()
        return answer

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        key: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        try:
            with _refusals_of(""):
                return await self._client.start(
                    self._hold,
                    self.name,
                    key,
                    command,
                    env=env,
                    deadline_seconds=None,
                    head_bytes=0,
                    tail_bytes=KEPT_TAIL_BYTES,
                    spill_bytes=KEPT_OUTPUT_BYTES,
                    terminal=terminal,
                )
        except ValueError as error:
            raise FileError("", str(error)) from error

    async def processes(self, *, key: str) -> Sequence[tuple[str, bool]]:
        with _refusals_of(""):
            state = (await self._change("GET", self._path, key)).json()
        return [(process["id"], process["state"] == "Running") for process in state["processes"]]

    async def process(self, process: str, *, key: str | None = None) -> ProcessStatus | None:
        path, hold = f"{self._path}/processes/{process}", self._hold if key is not None else None
        try:
            with _refusals_of(process):
                status = (await self._client.call("GET", path, hold=hold, key=key)).json()
        except SandboxFailure as failure:
            if failure.reason != "WorkspaceLost":
                raise
            await self.require_live()
            return None
        return ProcessStatus(
            id=process,
            running=status["state"] == "Running",
            exit_code=status["exitCode"],
            input_bytes=status["inputBytes"],
            output_bytes=status["stdout"]["bytes"],
            stderr=bytes_of(status["stderr"]["tail"]),
            seconds=status["seconds"],
        )

    async def write_input(self, process: str, offset: int, data: bytes, *, key: str) -> None:
        path, query = f"{self._path}/processes/{process}/stdin", [("offset", str(offset))]
        with _refusals_of(process, "Conflict"):
            await self._change("POST", path, key, query=query, body=data)

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        wait_seconds = min(wait_seconds, WAIT_SECONDS)
        reply = await self._client.call(
            "GET",
            f"{self._path}/processes/{process}/output",
            query=[("cursor", str(cursor)), ("waitSeconds", f"{wait_seconds:.3f}")],
            wait_seconds=wait_seconds,
        )
        headers = reply.headers
        return Output(
            data=reply.body,
            next=int(headers["rollout-output-next"]),
            ended=headers["rollout-output-end"] == "true",
            lost=int(headers["rollout-output-lost"]),
        )

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20, owner: str | None = None) -> bytes:
        query = [("offset", "0"), ("limit", str(limit)), *_owned(owner)]
        return (await self._file("GET", "files", path, key, query)).body

    async def write(
        self, path: str, data: bytes, *, key: str, mode: str = "644", replace: bool = False, owner: str | None = None
    ) -> None:
        query = [("mode", mode), ("replace", "true" if replace else "false"), *_owned(owner)]
        await self._file("PUT", "files", path, key, query, data)

    async def remove(self, path: str, *, key: str, owner: str | None = None) -> None:
        try:
            await self._file("DELETE", "files", path, key, _owned(owner))
        except MissingFile:
            return

    async def stat(self, path: str, *, key: str | None = None, owner: str | None = None) -> FileStat | None:
        try:
            reply = await self._file("GET", "stat", path, key, _owned(owner))
        except MissingFile:
            return None
        return file_stat(posixpath.basename(path.rstrip("/")) or "/", reply.json())

    async def list(self, path: str, *, key: str | None = None) -> list[FileStat]:
        reply = await self._file("GET", "list", path, key)
        return sorted((file_stat(entry["name"], entry) for entry in reply.json()["entries"]), key=lambda s: s.name)

    async def tar(self, path: str, *, parts: Sequence[str] = ()) -> AsyncIterator[bytes]:
        query = [("path", self._absolute(path)), *(("part", part) for part in parts)]
        async for chunk in self._client.stream(f"{self._path}/tar", query):
            yield chunk

    async def untar(
        self,
        path: str,
        data: AsyncIterator[bytes],
        *,
        key: str,
        ancestors: Ancestors = "refuse",
        owner: str | None = None,
    ) -> None:
        """See Workspace. A broken connection ends it with SandboxFailure: the stream cannot be read again."""
        await self._file("PUT", "tar", path, key, [("ancestors", ancestors), *_owned(owner)], data)

    async def carry(
        self, path: str, rules: Sequence[Mapping[str, Any]], data: AsyncIterator[bytes], *, key: str
    ) -> Carried:
        """See Workspace. A broken connection has the same effect as in `untar`."""

        async def body() -> AsyncIterator[bytes]:
            yield json.dumps(rules).encode() + b"\n"
            async for chunk in data:
                yield chunk

        reply = (await self._file("PUT", "carry", path, key, body=body())).json()
        dropped: list[str] = reply["dropped"]
        if reply["more"]:
            dropped.append(f"… and {reply['more']} more")
        return Carried(dropped, reply["changes"])

    async def layers(self) -> Sequence[str]:
        names: list[str] = (await self._read(self._path)).json()["layers"]
        return names

    async def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        path = self._path if layer is None else f"/workspaces/{layer}"
        query = [("path", kept) for kept in self._spec.snapshot_paths]
        with _refusals_of(self.working_dir):
            async for chunk in self._client.stream(f"{path}/snapshot", query):
                yield chunk

    @property
    def services(self) -> Mapping[str, ExecutorWorkspace]:
        return self._services()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """See Workspace."""
        await self._pause(PAUSE_SECONDS)
        extending = asyncio.create_task(self._extend_pause())
        try:
            yield
            # Fails if the pause has ended in the meantime, for example because this process stood still.
            await self._pause(PAUSE_SECONDS, extends=True)
        finally:
            extending.cancel()
            await asyncio.wait({extending})
            with contextlib.suppress(SandboxFailure, WorkspaceLimit, Fenced):
                await self._pause(0)

    async def _extend_pause(self) -> None:
        with contextlib.suppress(SandboxFailure, WorkspaceLimit, Fenced):  # then the last extension fails too
            while True:
                await asyncio.sleep(PAUSE_SECONDS / 4)
                await self._pause(PAUSE_SECONDS, extends=True)

    async def _pause(self, seconds: float, *, extends: bool = False) -> None:
        body = {"seconds": seconds, "extends": extends}
        await self._client.call("PUT", f"{self._path}/pause", hold=self._hold, json_body=body)

    async def restore(self, data: AsyncIterator[bytes], *, key: str) -> None:
        await self._change("PUT", f"{self._path}/restore", key, body=data)

    async def enter(self, phase: Phase, *, key: str) -> None:
        await self.set_network(self._spec.network.get(phase, "None"), key=key)

    async def set_network(self, access: NetworkAccess, *, key: str) -> None:
        """Switch the network to an access that belongs to no phase."""
        await self._change("PUT", f"{self._path}/network", key, json_body={"network": access})

    def secret(self, purpose: str) -> bytes:
        return self._client.secret(f"{purpose} of workspace {self.name}")

    def serve_model(self, server: web.Server) -> AbstractAsyncContextManager[str]:
        return serve_model(self._client, self._hold, self._path, server)

    async def missed_requests(self) -> int:
        port = (await self._read(self._path)).json()["modelPort"]
        return 0 if port is None else int(port["missed"])

    async def failed_connections(self) -> Mapping[str, str | None]:
        failed: dict[str, str | None] = (await self._read(f"{self._path}/network")).json()["failed"]
        return failed

    async def stood_still(self) -> float:
        return float((await self._read(self._path)).json()["stoodStill"])

    async def set_steady(self, is_steady: bool) -> None:
        await self._client.call("PUT", f"{self._path}/steady", hold=self._hold, json_body={"steady": is_steady})

    async def kill_all(self, *, key: str) -> None:
        await self._change("DELETE", f"{self._path}/processes", key)

    async def acknowledge(self, turn: int) -> None:
        path = f"/attempts/{self._hold.attempt}/watermark"
        await self._client.call("PUT", path, hold=self._hold, json_body={"turn": turn})

    async def release(self) -> None:
        """See Workspace. Raises Fenced if another runner holds the attempt and the workspace still exists."""
        await (self._end or self.destroy)()

    async def destroy(self) -> None:
        """Destroy this workspace without its forks and its place. Raises Fenced as `release`."""
        try:
            await self._client.call("DELETE", f"/attempts/{self._hold.attempt}", hold=self._hold)
        except Fenced:
            # The executor reports a forgotten attempt as fenced, also after an earlier call of this method.
            with contextlib.suppress(SandboxFailure):
                await self._read(self._path)
                raise
        except SandboxFailure:
            pass

    def _absolute(self, path: str) -> str:
        return posixpath.join(self.working_dir, path)

    async def _read(self, path: str) -> Reply:
        return await self._client.call("GET", path)

    async def _change(self, method: str, path: str, key: str, **arguments: Any) -> Reply:
        return await self._client.call(method, path, hold=self._hold, key=key, **arguments)

    async def _file(
        self, method: str, route: str, path: str, key: str | None, query: Query = (), body: Body = None
    ) -> Reply:
        full = self._absolute(path)
        hold = self._hold if key is not None else None
        query = [("path", full), *query]
        try:
            with _refusals_of(full):
                return await self._client.call(
                    method, f"{self._path}/{route}", hold=hold, key=key, query=query, body=body
                )
        except UnicodeEncodeError as error:
            raise FileError(full, f"{full!r} cannot be a file name: {error.reason}") from error
