"""Workspaces in memory for tests: the keys, fences and lifetimes of real ones, without processes.

The test's own function runs the commands. `on_call` is awaited before every call and may raise or wait, to inject
failures and delays. Worlds are kept in a registry of the class, so another provider of the same world reattaches as
another process would.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import posixpath
import secrets
import socket
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web

from agent_runtime.sandboxes.base import (
    Ancestors,
    Carried,
    CommandResult,
    Fence,
    Fenced,
    FileError,
    FileStat,
    SandboxFailure,
    Workspace,
    WorkspaceSpec,
    ignore_pauses,
)
from agent_runtime.sandboxes.executor_client.sandbox import no_place
from agent_runtime.sandboxes.prepare import PreparedGroups, prepare
from rollout_api.sandbox import NetworkAccess, Phase


@dataclass
class Files:
    """The regular files of a workspace by absolute path. A folder exists if a file is below it."""

    content: dict[str, bytes] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    network: NetworkAccess = "None"

    def copy(self) -> Files:
        """Return an independent copy of the files."""
        return Files(dict(self.content), dict(self.modes))

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder."""
        return sorted(path for path in self.content if path.startswith(folder.rstrip("/") + "/"))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with everything below it."""
        for gone in [path, *self.below(path)]:
            self.content.pop(gone, None)
            self.modes.pop(gone, None)


Command = Callable[[str | Sequence[str], Files], Awaitable[CommandResult]]
OnCall = Callable[[str, str, str | None], Awaitable[None]]
"""(operation, attempt, key): awaited before each call that reaches a workspace, and before `acquire`."""


@dataclass
class DummyState:
    """One workspace of a world, whoever holds it."""

    files: Files
    fence: Fence
    lost: SandboxFailure | None = None
    replies: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    requests: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    watermark: int = 0
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    model_port: socket.socket | None = None
    """Listens as long as the phase lasts. Connections without a server wait in its backlog."""
    model_listener: asyncio.Server | None = None

    def close_model_port(self) -> None:
        """Refuse further connections."""
        if self.model_listener is not None:
            self.model_listener.close()
            self.model_listener = None
        if self.model_port is not None:
            self.model_port.close()
            self.model_port = None


@dataclass
class World:
    """The state that outlives a provider object."""

    workspaces: dict[str, DummyState] = field(default_factory=dict)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    failed_connections: Mapping[str, str | None] = field(default_factory=dict)
    """What each workspace returns; see Workspace."""
    stood_still: float = 0.0
    """What each workspace returns; see Workspace."""


def ended(code: int = 0, stdout: bytes = b"", stderr: bytes = b"") -> CommandResult:
    """Return the result of a command that ended by itself."""
    return CommandResult(
        code, None, None, 0.0, stdout, stderr, len(stdout), len(stderr), 0, 0, len(stdout), len(stderr)
    )


async def every_command_succeeds(_command: str | Sequence[str], _files: Files) -> CommandResult:
    """Run commands by default: all succeed."""
    return ended()


async def nothing_happens(_operation: str, _attempt: str, _key: str | None) -> None:
    """Inject no failure."""


class DummyProvider:
    """Implements SandboxProvider in memory. Providers of one `world` share its workspaces."""

    name = "dummy"
    worlds: ClassVar[dict[str, World]] = {}

    def __init__(
        self,
        world: str,
        command: Command = every_command_succeeds,
        *,
        places: int = 1024,
        on_call: OnCall = nothing_happens,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.warnings: Sequence[str] = ["nothing is isolated: commands are functions of the test"]
        self.world = self.worlds.setdefault(world, World())
        self.command, self.on_call = command, on_call
        self.pause = pause
        self._places = places
        self._prepared: dict[str, Files] = {}
        self._groups = PreparedGroups(self._prepare, self._drop)

    async def open(self) -> None:
        """Do nothing."""

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> DummyWorkspace:
        """See SandboxProvider."""
        await self.on_call("acquire", attempt, None)
        identity = f"{attempt}.{name}"
        state = self.world.workspaces.get(identity)
        if state is None:
            prepared = await self._groups.fork_of(spec)
            files = self._prepared[prepared]
            await self._groups.fork_ended(prepared)
            await self._wait_for_place(identity, spec.start_seconds)
            state = self.world.workspaces[identity] = DummyState(files.copy(), fence)
        raise_fence(state, fence)
        return DummyWorkspace(self, identity, spec, state, fence)

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> DummyWorkspace:
        """See SandboxProvider."""
        state = self.world.workspaces.get(handle["workspace"])
        if state is None:
            raise SandboxFailure("WorkspaceLost", f"workspace {handle['workspace']} is gone")
        raise_fence(state, fence)
        return DummyWorkspace(self, handle["workspace"], spec, state, fence)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider."""
        for identity in list(self.world.workspaces):
            attempt, _, name = identity.partition(".")
            if unwanted(attempt, name):
                self.lose(identity)
                self.remove(identity)

    async def forget_group(self, group: str) -> None:
        """See SandboxProvider."""
        await self._groups.forget(group)

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        """See SandboxProvider."""
        if not keep:
            for identity in list(self.world.workspaces):
                self.lose(identity)
                self.remove(identity)

    def lose(self, identity: str, reason: str = "SandboxLost") -> None:
        """Lose the sandbox of a workspace (`ATTEMPT.NAME`): running and later calls fail."""
        state = self.world.workspaces[identity]
        state.lost = SandboxFailure(reason, f"workspace {identity} was lost on the test's order")
        state.close_model_port()
        for task in state.replies.values():
            task.cancel()

    def remove(self, identity: str) -> None:
        """Remove the workspace and free its place."""
        self.world.workspaces.pop(identity, None)
        self.world.freed.set()

    async def _wait_for_place(self, identity: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while len(self.world.workspaces) >= self._places:
                    self.world.freed.clear()
                    await self.world.freed.wait()
        except TimeoutError as error:
            raise no_place(identity, seconds) from error

    async def _prepare(self, name: str, spec: WorkspaceSpec) -> None:
        state = DummyState(Files(), Fence(1, "prepare"))
        await prepare(DummyWorkspace(self, name, spec, state, state.fence), spec)
        self._prepared[name] = state.files

    async def _drop(self, name: str) -> None:
        self._prepared.pop(name, None)


def raise_fence(state: DummyState, fence: Fence) -> None:
    """Take the workspace over. Raises Fenced if a newer fence, or an equal one of another holder, is current."""
    stands = state.fence
    if fence.epoch < stands.epoch or (fence.epoch == stands.epoch and fence.holder != stands.holder):
        raise Fenced(f"epoch {stands.epoch} of {stands.holder} holds this attempt; {fence.epoch} is too low")
    state.fence = fence


class DummyWorkspace:
    """Implements Workspace on the files of a DummyState."""

    def __init__(
        self, provider: DummyProvider, identity: str, spec: WorkspaceSpec, state: DummyState, fence: Fence
    ) -> None:
        self.handle: Mapping[str, Any] = {"provider": "dummy", "workspace": identity}
        self.description: Mapping[str, Any] = {"provider": "dummy", "mode": "Overlay", "imageUsed": False}
        self.working_dir = spec.working_dir
        self.alone = spec.alone
        self._provider, self._identity, self._spec = provider, identity, spec
        self._state, self._fence = state, fence

    async def run(
        self,
        command: str | Sequence[str],
        *,
        key: str,
        deadline_seconds: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        bounded: bool = False,
        head_bytes: int = 65_536,
        tail_bytes: int = 65_536,
        pausing: Callable[[bool], None] = ignore_pauses,
    ) -> CommandResult:
        """See Workspace."""

        async def work() -> CommandResult:
            if self._provider.pause is not None:
                pausing(True)
                await self._provider.pause()
                pausing(False)
            started = time.monotonic()
            try:
                async with asyncio.timeout(deadline_seconds):
                    return await self._provider.command(command, self._state.files)
            except TimeoutError:
                return CommandResult(None, 9, "Deadline", time.monotonic() - started, b"", b"", 0, 0)

        request = (command if isinstance(command, str) else tuple(command), cwd, user, stdin)
        result: CommandResult = await self._once("run", key, request, work)
        return result

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20, owner: str | None = None) -> bytes:
        """See Workspace."""

        async def work() -> bytes:
            return self._existing(path)[:limit]

        data: bytes = await self._once("read", key, (path, limit), work)
        return data

    async def write(
        self, path: str, data: bytes, *, key: str, mode: str = "644", replace: bool = False, owner: str | None = None
    ) -> None:
        """See Workspace."""

        async def work() -> None:
            full = self._absolute(path)
            files = self._state.files
            if files.below(full) and not replace:
                raise FileError(full, f"{full!r} is a folder; give the name of a file")
            files.remove(full)
            files.content[full], files.modes[full] = data, int(mode, 8)

        await self._once("write", key, (path, data, mode, replace), work)

    async def remove(self, path: str, *, key: str, owner: str | None = None) -> None:
        """See Workspace."""

        async def work() -> None:
            self._state.files.remove(self._absolute(path))

        await self._once("remove", key, (path,), work)

    async def stat(self, path: str, *, key: str | None = None, owner: str | None = None) -> FileStat | None:
        """See Workspace."""

        async def work() -> FileStat | None:
            return self._stat(self._absolute(path))

        found: FileStat | None = await self._once("stat", key, (path,), work)
        return found

    async def list(self, path: str, *, key: str | None = None) -> list[FileStat]:
        """See Workspace."""

        async def work() -> list[FileStat]:
            full = self._absolute(path)
            names = {below[len(full.rstrip("/")) + 1 :].split("/")[0] for below in self._state.files.below(full)}
            if not names and full != self.working_dir:
                raise FileError(full, f"{full!r} is no folder")
            entries = [self._stat(posixpath.join(full, name)) for name in sorted(names)]
            return [entry for entry in entries if entry is not None]

        entries: list[FileStat] = await self._once("list", key, (path,), work)
        return entries

    async def tar(self, path: str, *, parts: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """See Workspace."""
        await self._enter_call("tar", None)
        full, buffer = self._absolute(path), io.BytesIO()
        files = self._state.files
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for below in files.below(full) or [full]:
                relative = posixpath.relpath(below, full) if below != full else posixpath.basename(full)
                if parts and not any(part in (".", relative) or relative.startswith(f"{part}/") for part in parts):
                    continue
                entry = tarfile.TarInfo(relative)
                data = self._existing(below)
                entry.size, entry.mode = len(data), files.modes[below]
                archive.addfile(entry, io.BytesIO(data))
        yield buffer.getvalue()

    async def carry(
        self, path: str, rules: Sequence[Mapping[str, Any]], data: AsyncIterator[bytes], *, key: str
    ) -> Carried:
        """See Workspace. Here the tar replaces everything in its parts."""
        for number, form in enumerate(rules):
            await self.remove(posixpath.normpath(posixpath.join(path, form["root"])), key=f"{key}-before-{number}")
        await self.untar(path, data, key=key)
        return Carried([])

    async def untar(
        self,
        path: str,
        data: AsyncIterator[bytes],
        *,
        key: str,
        ancestors: Ancestors = "refuse",
        owner: str | None = None,
    ) -> None:
        """See Workspace. There are no links here."""
        archive = b"".join([chunk async for chunk in data])

        async def work() -> None:
            with tarfile.open(fileobj=io.BytesIO(archive)) as entries:
                for entry in entries:
                    target = posixpath.normpath(posixpath.join(self._absolute(path), entry.name))
                    if not target.startswith(self._absolute(path).rstrip("/") + "/"):
                        raise FileError(entry.name, f"{entry.name!r} leaves {path!r}")
                    content = entries.extractfile(entry) if entry.isfile() else None
                    if content is not None:
                        self._state.files.content[target] = content.read()
                        self._state.files.modes[target] = entry.mode

        await self._once("untar", key, (path, archive), work)

    async def layers(self) -> Sequence[str]:
        """See Workspace. A snapshot contains everything here."""
        return ()

    async def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        """See Workspace. Here the snapshot is the whole working folder."""
        async for chunk in self.tar(self.working_dir):
            yield chunk

    @property
    def services(self) -> Mapping[str, Workspace]:
        """See Workspace. There are none."""
        return {}

    def paused(self) -> AbstractAsyncContextManager[None]:
        """See Workspace. Nothing runs between two calls here."""
        return nullcontext()

    async def restore(self, data: AsyncIterator[bytes], *, key: str) -> None:
        """See Workspace."""
        await self.untar(self.working_dir, data, key=key)

    async def freeze(self) -> None:
        """See Workspace. There are no processes here."""
        await self._enter_call("freeze", None)

    async def fork(self, name: str, *, of: str | None = None) -> DummyWorkspace:
        """See Workspace."""
        await self._enter_call("fork", None)
        identity = f"{self._identity.partition('.')[0]}.{name}"
        workspaces = self._provider.world.workspaces
        parent = self._state if of is None else workspaces[of]
        state = workspaces.setdefault(identity, DummyState(parent.files.copy(), self._fence))
        raise_fence(state, self._fence)
        return DummyWorkspace(self._provider, identity, self._spec, state, self._fence)

    async def discard(self, other: str) -> None:
        """See Workspace."""
        if other in self._provider.world.workspaces:
            self._provider.lose(other, "WorkspaceLost")
            self._provider.remove(other)

    async def enter(self, phase: Phase, *, key: str) -> None:
        """See Workspace."""

        async def work() -> None:
            self._state.close_model_port()
            self._state.files.network = self._spec.network.get(phase, "None")

        await self._once("enter", key, (phase,), work)

    def secret(self, purpose: str) -> bytes:
        """See Workspace."""
        return hmac.digest(self._state.seed, purpose.encode(), "sha256")

    async def missed_requests(self) -> int:
        """See Workspace. They are not counted here."""
        return 0

    async def failed_connections(self) -> Mapping[str, str | None]:
        """See Workspace."""
        await self._enter_call("failed_connections", None)
        return self._provider.world.failed_connections

    async def stood_still(self) -> float:
        """See Workspace."""
        return self._provider.world.stood_still

    @asynccontextmanager
    async def serve_model(self, server: web.Server) -> AsyncIterator[str]:
        """See Workspace. Here it serves on this machine's loopback, and only requests that were not sent yet are held."""
        await self._enter_call("serve_model", None)
        state = self._state
        if state.model_port is None:
            state.model_port = socket.create_server(("127.0.0.1", 0))
        port = state.model_port.getsockname()[1]
        connections: list[web.RequestHandler] = []

        def accept() -> web.RequestHandler:
            connections.append(server())
            return connections[-1]

        listener = await asyncio.get_running_loop().create_server(accept, sock=state.model_port.dup())
        state.model_listener = listener
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            listener.close()
            for connection in connections:
                connection.force_close()

    async def set_steady(self, is_steady: bool) -> None:
        """See Workspace. Nothing pauses here."""

    async def kill_all(self, *, key: str) -> None:
        """See Workspace. No process outlives its call here."""
        await self._enter_call("kill_all", key)

    async def acknowledge(self, turn: int) -> None:
        """See Workspace."""
        await self._enter_call("acknowledge", None)
        self._state.watermark = max(self._state.watermark, turn)
        for key in [key for key in self._state.replies if turn_of(key) < turn]:
            del self._state.replies[key], self._state.requests[key]

    async def release(self) -> None:
        """See Workspace."""
        if self._provider.world.workspaces.get(self._identity) is not self._state:
            return
        self._require_fence()
        attempt, _, name = self._identity.partition(".")
        own = f"{attempt}.{name.partition('.')[0]}"
        for other in [found for found in self._provider.world.workspaces if f"{found}.".startswith(f"{own}.")]:
            self._provider.lose(other, "WorkspaceLost")
            self._provider.remove(other)

    async def _once(
        self, operation: str, key: str | None, request: tuple[Any, ...], work: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Return the reply of that key: remembered, joined, or computed now. The work continues if a caller
        disconnects.
        """
        await self._enter_call(operation, key)
        if key is None:
            return await work()
        state = self._state
        if turn_of(key) < state.watermark:
            raise SandboxFailure("Forgotten", f"key {key!r} lies below the watermark {state.watermark}")
        task = state.replies.get(key)
        if task is None:
            task = state.replies[key] = asyncio.ensure_future(work())
            state.requests[key] = (operation, *request)
        elif state.requests[key] != (operation, *request):
            raise SandboxFailure("KeyReused", f"key {key!r} was used for another request: {state.requests[key]}")
        await asyncio.wait([task])
        if state.lost is not None:
            raise state.lost
        return task.result()

    async def _enter_call(self, operation: str, key: str | None) -> None:
        await self._provider.on_call(operation, self._identity, key)
        if self._state.lost is not None:
            raise self._state.lost
        self._require_fence()

    def _require_fence(self) -> None:
        if self._state.fence != self._fence:
            raise Fenced(f"epoch {self._state.fence.epoch} of {self._state.fence.holder} holds this attempt")

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.working_dir, path))

    def _existing(self, path: str) -> bytes:
        full = self._absolute(path)
        if full not in self._state.files.content:
            raise FileError(full, f"{full!r}: no such file")
        return self._state.files.content[full]

    def _stat(self, full: str) -> FileStat | None:
        files, name = self._state.files, posixpath.basename(full)
        if full in files.content:
            return FileStat(name, "file", len(files.content[full]), files.modes[full], 0.0)
        if files.below(full) or full == self.working_dir:
            return FileStat(name, "folder", 0, 0o755, 0.0)
        return None


def turn_of(key: str) -> int:
    """Return the turn of an idempotency key, `TURN:NAME`."""
    return int(key.partition(":")[0])
