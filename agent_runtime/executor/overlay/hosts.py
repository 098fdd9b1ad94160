"""The two hosts of workspaces. Both fork workspaces from a zygote, enforce limits, and remove everything at the end.
`open_overlay_or_plain` tests `Overlay` with a trial workspace, and falls back to `Plain` if the mode is `Auto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agent_runtime.executor import kernel
from agent_runtime.executor.host import FileFailure, HostFailure, WorkspaceFailure, WorkspaceSpec
from agent_runtime.executor.init import processes
from agent_runtime.executor.init.channel import Message, StartRequest, close_all
from agent_runtime.executor.init.trees import DiskUse
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.peer import Peer, PeerClosed
from agent_runtime.executor.overlay.watch import Watch
from agent_runtime.executor.overlay.workspace import InitProcess, Workspace, spawn
from agent_runtime.executor.overlay.zygote import take_zygote
from agent_runtime.executor.timing import until_ready

# Creating a workspace takes milliseconds, or seconds on an overloaded machine.
_CREATE_SECONDS = 60.0
_HELLO = 0
# Killing all processes of a workspace takes milliseconds, or 10 s for a fork bomb; tools may obstruct it.
_SWEEP_SECONDS = 15.0
_NOBODY = "65534:65534"
# With less free space than this, the disk counts as full: a command's output may be incomplete.
_FULL_BYTES = 4 * 1024 * 1024
# A workspace that uses less than this did not fill the disk, however small the disk is.
_LEAST_SHARE_BYTES = 64 * 1024 * 1024
_FREED_SECONDS = 2.0
# CLOCK_REALTIME_COARSE of linux/time.h, from which files get their times. It is a little behind CLOCK_REALTIME.
_FILE_CLOCK = 5
# In a container, nice value of tools. All other processes there are tools, and this process and the workspaces' inits
# get 9 times the weight of a tool's thread; otherwise hundreds of busy threads would delay every answer. Not on a
# machine, where it would also give other programs priority over tools.
_TOOL_NICE = 10
# Limit of spares, which use memory: as many as a group has members, because their workspaces are created together.
_MOST_SPARES = 8


def _in_container() -> bool:
    return os.getpid() == 1


def _plain_user() -> str | None:
    """Return the default user of commands in `Plain`: the container's own user, but never the machine's root."""
    may_switch = kernel.effective_capabilities() >> kernel.CAP_SETUID & 1
    return _NOBODY if os.geteuid() == 0 and may_switch and not _in_container() else None


def _bytes_a_file(info: os.statvfs_result) -> int:
    """Return a file's share of a file system that also limits the number of files; 0 if it does not."""
    return info.f_blocks * info.f_frsize // info.f_files if info.f_files else 0


def _process_ended(who: str, why: object) -> WorkspaceFailure:
    return WorkspaceFailure("WorkspaceEnded", f"the process that {who} has ended ({why}); restart the executor")


async def kill(process: int) -> None:
    """Kill the process of that pid descriptor; returns when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    await until_ready(process)


class Host:
    """The common part of both hosts."""

    mode = ""
    isolates = False
    """Whether workspaces have their own namespaces and layers."""
    unasked_end = "WorkspaceEnded"
    """Cause recorded when a workspace's init is killed or stopped by another process than this host."""

    def __init__(self, config: HostConfig, zygote: Peer, zygote_pid: int, lock: int) -> None:
        self.places = config.places
        self.config = config
        self._zygote = zygote
        self._zygote_pid = zygote_pid
        self._lock = lock
        self._live: set[Workspace] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self._blaming = asyncio.Lock()
        # The folder on whose file system tools write; the /proc that lists all tools; their nice value.
        self.written = config.state_dir if self.isolates else config.root
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.tool_nice = os.getpriority(os.PRIO_PROCESS, 0) + (_TOOL_NICE if _in_container() else 0)
        self.watch = Watch(self)
        # If the disk is full and workspaces use at least half of it, one of them uses at least this much.
        self._share = max(_LEAST_SHARE_BYTES, self.room() // (2 * self.places))

    async def create(self, spec: WorkspaceSpec) -> Workspace:
        """Create a workspace. Raises WorkspaceFailure."""
        raise NotImplementedError

    def on_broken(self, call: Callable[[str], None]) -> None:
        """Call a function with the reason when no workspace can be created any more. In `Plain` only the tools of its
        workspace can cause that, and the workspace fails.
        """

    def guarantees(self) -> dict[str, str]:
        """Return how each limit and isolation is enforced here, or `None: <why>`."""
        raise NotImplementedError

    async def ask(self, message: Message) -> Message:
        """Send a request to the zygote. Raises WorkspaceFailure on failure."""
        try:
            reply, received = await self._zygote.ask(message)
        except PeerClosed as gone:
            raise _process_ended("creates workspaces", gone) from None
        close_all(received)
        if "error" in reply:
            raise WorkspaceFailure("CreateFailed", str(reply["error"]))
        return reply

    async def _make(self, spec: WorkspaceSpec, extra: Message, shared: Sequence[int] = ()) -> Workspace:
        """Have the zygote fork an init. If this raises, everything is removed. `shared`: see `Workspace.shared`."""
        init, layer = await self._fork_init(spec, extra, shared)
        workspace = Workspace(self, spec, init, layer)
        self._live.add(workspace)
        return workspace

    async def _fork_init(
        self, spec: WorkspaceSpec, extra: Message, shared: Sequence[int] = (), numbers: Iterator[int] | None = None
    ) -> tuple[InitProcess, str]:
        """Return a new init and the layer that was created for it. Raises WorkspaceFailure."""
        request = {
            "do": "create",
            "user": spec.user or self.config.user,
            "workingDir": spec.working_dir,
            "nice": self.tool_nice,
            "environment": dict(self.config.environment),
            "root": self.config.root,
            "memoryBytes": spec.limits.memory_bytes,
            "processes": spec.limits.processes,
            "diskBytes": spec.limits.disk_bytes,
            "fileBytes": spec.limits.file_bytes,
            "shares": spec.shares,
            "volumes": dict(spec.volumes),
            **extra,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        our_starts, their_starts = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = Peer(ours, our_starts, numbers)
        reply: Message = {}
        received: list[int] = []
        try:
            hello = peer.expect(_HELLO)
            async with asyncio.timeout(_CREATE_SECONDS):
                with theirs, their_starts:
                    reply, received = await self._zygote.ask(request, [theirs.fileno(), their_starts.fileno(), *shared])
                greeting, handles = await hello if "error" not in reply and len(received) == 1 else (reply, [])
            if "error" in greeting or len(received) != 1:
                raise PeerClosed(greeting.get("error"))
        except BaseException as error:
            peer.close("it was not created")
            for process in received:
                await asyncio.shield(kill(process))
                os.close(process)
            if "layer" in reply:
                self.remove_layer(reply["layer"])
            if isinstance(error, PeerClosed):
                raise WorkspaceFailure("CreateFailed", f"workspace {spec.id!r} cannot be created: {error}") from None
            if isinstance(error, TimeoutError):
                problem = f"workspace {spec.id!r} was not created in {_CREATE_SECONDS:.0f} s"
                raise WorkspaceFailure("CreateFailed", problem) from None
            raise
        peer.forget(_HELLO)
        proc, shm, *own_shared = handles or (self.proc, None)
        assert proc is not None
        own = tuple(handle for handle in own_shared if handle is not None)
        return InitProcess(peer, received[0], int(reply["pid"]), proc, shm, own), reply.get("layer", "")

    async def wake(self, workspace: Workspace) -> InitProcess:
        """Return a new init for a workspace that rests. Raises WorkspaceFailure."""
        raise NotImplementedError

    def rest_later(self, workspace: Workspace) -> None:
        """Let the workspace rest if nothing is done in it for `rest_seconds`."""
        seconds = self.config.rest_seconds
        if seconds is not None and self.isolates:
            # One timer each: with one for each command, many ended workspaces would stay in memory.
            workspace.stop_rest_timer()
            workspace.rest_timer = asyncio.get_running_loop().call_later(seconds, self._let_rest, workspace)

    def _let_rest(self, workspace: Workspace) -> None:
        if workspace in self._live:
            workspace.run_in_background(workspace.rest())

    def remove_layer(self, layer: str) -> None:
        """Remove the files of an unused layer."""
        raise NotImplementedError

    async def measure_disk(self, workspace: Workspace, *, least: int = 0, enough: int = sys.maxsize) -> DiskUse:
        """Count the disk that the workspace's files use, as `trees.disk_use` does."""
        folder, since = self._files_of(workspace)
        request = {"do": "measure", "folder": folder, "since": since, "least": least, "enough": enough}
        counted = await self.ask(request)
        return DiskUse(counted["bytes"], counted["is_disturbed"], counted["is_evaded"])

    def _files_of(self, workspace: Workspace) -> tuple[str, int | None]:
        """Return the folder that the workspace writes to. If others write there too, also the time of its creation."""
        raise NotImplementedError

    @property
    def is_disk_full(self) -> bool:
        """Whether the disk is full, whatever filled it."""
        return self.room() < _FULL_BYTES

    def room(self) -> float:
        """Return the bytes that can still be written, in files of at least `_bytes_a_file`."""
        info = os.statvfs(self.written)
        # A file system that is read-only, or reports no size as some in-memory ones, is never full.
        if not info.f_blocks or info.f_flag & os.ST_RDONLY:
            return math.inf
        room = info.f_bavail * info.f_frsize
        return min(room, info.f_favail * _bytes_a_file(info)) if info.f_files else room

    async def cause_of_full_disk(self, workspace: Workspace) -> str:
        """Return `Disk` if that workspace has filled the disk, `WorkspaceEnded` if it may have, else `DiskFull`.

        Kills its processes first: they could move files during the count, or hold deleted files that cannot be listed,
        because they are only mapped or in transit through a socket. Workspaces that share limits count together, because
        the policy can write through a service.
        """
        async with self._blaming:
            while self._removals:
                await asyncio.wait(self._removals)
            members, room = list(workspace.members), self.room()
            used = sum(member.last.disk_bytes for member in members)
            for member in members:
                with contextlib.suppress(WorkspaceFailure):
                    await member.kill_processes()
            try:
                least = _bytes_a_file(os.statvfs(self.written))
                counted = [await self.measure_disk(member, least=least) for member in members]
                used = max(used, sum(count.bytes for count in counted))
            except WorkspaceFailure as failure:
                if used < self._share:
                    message = f"the disk is full, and its files cannot be counted: {failure.message}"
                    await workspace.fail("WorkspaceEnded", message)
                    return "WorkspaceEnded"
            for member in members:
                member.has_filled_disk |= used >= self._share
            # The kernel may free a deleted file some time after its last process has ended.
            patience = time.monotonic() + _FREED_SECONDS
            while not (workspace.has_filled_disk or self._removals) and time.monotonic() < patience:
                await asyncio.sleep(_FREED_SECONDS / 50)
                if not self._removals and self.room() - room >= self._share:
                    # There is space again. Any writer may have freed it, so this workspace may have filled the disk.
                    await workspace.fail(
                        "WorkspaceEnded", "the disk was full, and had free space again after this workspace was ended"
                    )
                    return "WorkspaceEnded"
        return "Disk" if workspace.has_filled_disk else "DiskFull"

    async def end_init(self, workspace: Workspace, process: int) -> None:
        """Kill a workspace's init and everything in the workspace."""
        raise NotImplementedError

    async def forget(self, workspace: Workspace) -> None:
        """Remove a destroyed workspace from the list."""
        self._live.discard(workspace)
        workspace.members.discard(workspace)
        workspace.stop_rest_timer()
        self.watch.remove(workspace)

    async def read_frozen(
        self, workspace: Workspace, operation: str, arguments: Mapping[str, Any], stream: int | None
    ) -> dict[str, Any]:
        """Run a read-only file operation on a frozen workspace."""
        raise NotImplementedError

    def ancestors(self, workspace: Workspace) -> list[str]:
        """See Workspace.layers."""
        return []

    async def close(self) -> None:
        """Destroy all workspaces."""
        await self._end_all()
        self._zygote.close("the host was closed")
        await self._wait_for_zygote()
        os.close(self._lock)

    async def _end_all(self) -> None:
        for workspace in list(self._live):
            with contextlib.suppress(WorkspaceFailure):
                await workspace.destroy()
        self.watch.close()
        os.close(self.proc)

    async def _wait_for_zygote(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            process = os.pidfd_open(self._zygote_pid)
            try:
                await until_ready(process)
                os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 (it has ended)
            finally:
                os.close(process)


class OverlayHost(Host):
    """Hosts many workspaces, each with its own layers and namespaces."""

    mode = "Overlay"
    isolates = True

    def __init__(self, config: HostConfig, zygote: Peer, zygote_pid: int, lock: int, remover: Peer) -> None:
        super().__init__(config, zygote, zygote_pid, lock)
        self._remover = remover
        # Number of workspaces being created.
        self._begun = 0
        self._by_id: dict[str, Workspace] = {}
        # For each layer: the one below it, the workspace's id, and the number of layers above it (its own workspace
        # included).
        self._below: dict[str, str | None] = {}
        self._ids: dict[str, str] = {}
        self._users: dict[str, int] = {}
        # The layers that have no image below them.
        self._bare: set[str] = set()
        # Creating a workspace keeps one processor busy, so create at most one per processor at a time.
        self._making = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def create(self, spec: WorkspaceSpec) -> Workspace:
        await self._wait_for_room()
        parent: str | None = None
        if spec.parent is not None:
            standing = self._by_id.get(spec.parent)
            if standing is None or not standing.frozen:
                state = "does not exist" if standing is None else "is not frozen; freeze it first"
                raise WorkspaceFailure("CreateFailed", f"parent {spec.parent!r} {state}")
            parent = standing.layer
        joined = None
        if spec.joins is not None:
            joined = self._by_id.get(spec.joins)
            if joined is None or not joined.shared:
                raise WorkspaceFailure("CreateFailed", f"workspace {spec.joins!r} is not live, or does not share")
        if spec.id in self._by_id:
            raise WorkspaceFailure("CreateFailed", f"workspace {spec.id!r} exists already; destroy it first")
        if parent is not None:
            self._users[parent] += 1
        self._begun += 1
        try:
            shared = () if joined is None else joined.shared
            is_bare = spec.is_bare if parent is None else parent in self._bare
            workspace = await self._make(spec, self._lower(parent, is_bare), shared)
        except BaseException:
            self._release(parent)
            raise
        finally:
            self._begun -= 1
        if joined is not None:
            workspace.members, workspace.pause = joined.members, joined.pause
            joined.members.add(workspace)
        layer = workspace.layer
        self._below[layer], self._ids[layer], self._users[layer] = parent, spec.id, 1
        self._by_id[spec.id] = workspace
        if is_bare:
            self._bare.add(layer)
        self.rest_later(workspace)
        return workspace

    async def wake(self, workspace: Workspace) -> InitProcess:
        layer = workspace.layer
        lower = self._lower(self._below[layer], layer in self._bare, resumed=layer)
        async with self._making:
            extra = {**lower, "spares": self._spares_wanted()}
            init, _ = await self._fork_init(workspace.spec, extra, numbers=workspace.numbers)
        return init

    def _lower(
        self, layer: str | None, is_bare: bool, *, view_of: str | None = None, resumed: str | None = None
    ) -> Message:
        """Return what a spare must know of the layers below a workspace, the uppermost being `layer`."""
        return {"chain": self._chain(layer), "view_of": view_of, "is_bare": is_bare, "resumed": resumed}

    def on_broken(self, call: Callable[[str], None]) -> None:
        for peer in (self._zygote, self._remover):
            peer.gone.add_done_callback(lambda gone: call(gone.result()))

    async def _wait_for_room(self) -> None:
        """Wait for a free place, if only removals block it. A destroyed workspace keeps its place until its files are
        removed.
        """
        if self._remover.gone.done():
            raise _process_ended("removes layers", self._remover.gone.result())
        while self._removals and len(self._by_id) + self._begun + len(self._removals) >= self.places:
            await asyncio.wait(self._removals, return_when=asyncio.FIRST_COMPLETED)

    async def _make(self, spec: WorkspaceSpec, extra: Message, shared: Sequence[int] = ()) -> Workspace:
        async with self._making:
            return await super()._make(spec, {**extra, "spares": self._spares_wanted()}, shared)

    def _spares_wanted(self) -> int:
        """Return how many spares are needed for the free places, besides workspaces that are being created."""
        return max(1, min(self.places - len(self._by_id) - self._begun, _MOST_SPARES))

    async def _end_all(self) -> None:
        await super()._end_all()
        await asyncio.gather(*self._removals)
        self._remover.close("the host was closed")

    async def give_up(self) -> None:
        """Close this host, and return the zygote to its state before it became an overlay host."""
        await self._end_all()
        with contextlib.suppress(PeerClosed):
            await self._zygote.send(self._zygote.number(), {"do": "give up"})

    def _chain(self, layer: str | None) -> list[str]:
        chain = []
        while layer is not None:
            chain.append(layer)
            layer = self._below[layer]
        return chain

    def _release(self, layer: str | None) -> None:
        """Release one use of a layer. The last release removes it and releases the one below."""
        while layer is not None:
            self._users[layer] -= 1
            if self._users[layer]:
                return
            self.remove_layer(layer)
            self._bare.discard(layer)
            del self._users[layer], self._ids[layer]
            layer = self._below.pop(layer)

    def remove_layer(self, layer: str) -> None:
        removal = asyncio.create_task(self._remove(layer))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, layer: str) -> None:
        with contextlib.suppress(PeerClosed):
            await self._remover.ask({"layer": layer})

    def _files_of(self, workspace: Workspace) -> tuple[str, int | None]:
        return workspace.layer, None

    async def end_init(self, workspace: Workspace, process: int) -> None:
        await kill(process)

    async def forget(self, workspace: Workspace) -> None:
        if workspace in self._live:
            await super().forget(workspace)
            self._by_id.pop(workspace.spec.id, None)
            self._release(workspace.layer)
            with contextlib.suppress(PeerClosed):
                await self._zygote.send(self._zygote.number(), {"do": "spares", "spares": self._spares_wanted()})

    async def read_frozen(
        self, workspace: Workspace, operation: str, arguments: Mapping[str, Any], stream: int | None
    ) -> dict[str, Any]:
        spec = WorkspaceSpec(
            f"{workspace.spec.id} (read)", user=workspace.spec.user, working_dir=workspace.spec.working_dir
        )
        layer = workspace.layer
        self._users[layer] += 1
        try:
            view = await self._make(spec, self._lower(layer, layer in self._bare, view_of=layer))
        except BaseException:
            close_all([] if stream is None else [stream])
            self._release(layer)
            raise
        try:
            return await view.file(operation, arguments, stream)
        finally:
            self._live.discard(view)
            try:
                await asyncio.shield(view.stop())
            finally:
                self._release(layer)

    def ancestors(self, workspace: Workspace) -> list[str]:
        return [self._ids[layer] for layer in self._chain(self._below.get(workspace.layer))]

    def guarantees(self) -> dict[str, str]:
        return {
            "isolation": "its own user, mount, pid, ipc, uts and network namespaces, with container capabilities",
            "files": "its own copy-on-write layer, removed with the workspace; /dev/shm too",
            "memory": "RLIMIT_DATA for each process; the workspace's use checked every 20 ms, processes killed "
            "beyond it",
            "processes": "RLIMIT_NPROC for each user of the workspace's own user namespace; all threads checked too",
            "fileSize": "RLIMIT_FSIZE",
            "disk": "RLIMIT_FSIZE for each file; the layer measured when the disk's use changes, processes "
            "killed beyond it",
            "network": "its own network namespace with only a loopback",
            "cpu": "None: workspaces share the sandbox's processors, and too many busy threads of one are made nice",
        }


class PlainHost(Host):
    """Hosts one workspace on the given root, without its own namespaces. Tools of the same user can kill the processes
    that serve it.
    """

    mode = "Plain"
    unasked_end = "Attacked"

    def __init__(self, config: HostConfig, zygote: Peer, zygote_pid: int, lock: int) -> None:
        super().__init__(config, zygote, zygote_pid, lock)
        self.places = 1
        self._created_at = 0
        self._failing: asyncio.Task[None] | None = None
        zygote.gone.add_done_callback(lambda _: self._zygote_gone())

    async def create(self, spec: WorkspaceSpec) -> Workspace:
        if spec.parent is not None:
            raise WorkspaceFailure(
                "CreateFailed", "parent: Plain mode cannot fork; a new sandbox has the image's state"
            )
        if self._live:
            standing = next(iter(self._live)).spec.id
            raise WorkspaceFailure("CreateFailed", f"Plain mode supports one workspace; destroy {standing!r} first")
        self._created_at = time.clock_gettime_ns(_FILE_CLOCK)
        return await self._make(spec, {"user": spec.user or self.config.user or _plain_user()})

    def _zygote_gone(self) -> None:
        """Fail the workspaces, because the zygote has ended. It measures disk use and removes files, so a tool may have
        killed it.
        """
        for workspace in self._live:
            message = f"workspace {workspace.spec.id!r} has ended: the process that created it was killed"
            self._failing = asyncio.create_task(workspace.fail(self.unasked_end, message))

    def _files_of(self, workspace: Workspace) -> tuple[str, int | None]:
        # Count files instead of the file system's growth: other pods write to a node's disk too.
        return self.config.root, self._created_at

    async def end_init(self, workspace: Workspace, process: int) -> None:
        # Its orphans become children of the zygote, or ours if a tool has killed the zygote too. Continue the zygote if
        # a tool has stopped it.
        await kill(process)
        processes.send(self._zygote_pid, signal.SIGCONT)
        try:
            async with asyncio.timeout(_SWEEP_SECONDS):
                await self.ask({"do": "sweep"})
        except (WorkspaceFailure, TimeoutError):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, processes.kill_below, self.proc, os.getpid())

    def guarantees(self) -> dict[str, str]:
        return {
            "isolation": "None: only the sandbox isolates; tools see the executor's processes but cannot trace or "
            "read them; killing one ends the workspace",
            "files": "None: tools write the container's own root; a clean state is a new sandbox",
            "memory": "RLIMIT_DATA for each process; total use checked every 20 ms or so, killed beyond it",
            "processes": "the number of their threads checked every 20 ms or so, killed beyond it",
            "fileSize": "RLIMIT_FSIZE",
            "disk": "RLIMIT_FSIZE for each file; writes below root measured when the disk's use changes, processes "
            "killed beyond it",
            "network": "None: the sandbox's own network",
            "cpu": "None: tools share the sandbox's processors, and too many busy threads are made nice",
        }


async def open_overlay_or_plain(config: HostConfig) -> tuple[OverlayHost | PlainHost, str | None]:
    """See `open_host`."""
    lock = _lock(config.state_dir)
    zygote_pid, end = take_zygote()
    _prepare_process()
    zygote = Peer(end)
    reason = None
    if config.mode != "Plain":
        try:
            remover = await _prepare(zygote, config)
            overlay = OverlayHost(config, zygote, zygote_pid, lock, remover)
            try:
                await _try_out(overlay)
                return overlay, None
            except (WorkspaceFailure, FileFailure) as failure:
                await overlay.give_up()
                raise HostFailure(failure.message) from None
        except HostFailure as failure:
            reason = str(failure)
        if config.mode == "Overlay":
            zygote.close("Overlay is unavailable")
            os.close(lock)
            raise HostFailure(f"mode Overlay is unavailable here: {reason}")
    return PlainHost(config, zygote, zygote_pid, lock), reason


def _lock(state_dir: str) -> int:
    try:
        folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostFailure(f"stateDir {state_dir!r}: {error.strerror}; an existing folder is expected") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise HostFailure(f"stateDir {state_dir!r} is in use by another executor; give each its own") from None
    return folder


def _prepare_process() -> None:
    """Prepare the executor's own process: unreadable for tools, and reaping its orphans."""
    kernel.hide_from_tools()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if os.getpid() == 1:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def _prepare(zygote: Peer, config: HostConfig) -> Peer:
    """Make the zygote an overlay host; return the process that removes layers. Raises HostFailure."""
    request = {
        "do": "prepare",
        "layers": os.path.join(os.path.realpath(config.state_dir), "layers"),
        "root": os.path.realpath(config.root),
        "rootLayers": [os.path.realpath(layer) for layer in config.root_layers],
        "masks": list(config.masks),
        "binds": [list(bind) for bind in config.binds],
    }
    try:
        reply, received = await zygote.ask(request)
    except PeerClosed as gone:
        raise HostFailure(f"the process that creates workspaces has ended: {gone}") from None
    if "error" in reply:
        close_all(received)
        raise HostFailure(str(reply["error"]))
    return Peer(socket.socket(fileno=received[0]))


async def _try_out(host: OverlayHost) -> None:
    """Test all operations that workspaces need: create, write, run, freeze, fork, read, destroy.

    Runs as root, which every image has: a misspelt user must not make Overlay unavailable.
    """
    first = await host.create(WorkspaceSpec("trial", user="0"))
    try:
        readable, writable = os.pipe()
        os.close(writable)
        await first.file("write", {"path": "/tmp/trial"}, readable)
        streams = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for _ in range(3)]
        # an image without `true` is valid; the refusal shows that commands can be started
        with contextlib.suppress(FileFailure):
            command = await spawn(first, StartRequest(["true"]), streams)
            ended = await command.exited
            if ended.code != 0:
                raise WorkspaceFailure("CreateFailed", f"`true` ended with {ended} in a workspace")
        await first.freeze()
        fork = await host.create(WorkspaceSpec("trial fork", parent="trial", user="0"))
        try:
            await fork.file("stat", {"path": "/tmp/trial"})
        finally:
            await fork.destroy()
    finally:
        await first.destroy()
