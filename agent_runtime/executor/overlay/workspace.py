"""A live or frozen workspace in the executor: a channel to its init, and a handle to kill it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agent_runtime.executor.host import Exit, FileFailure, Watcher, WorkspaceFailure, WorkspaceSpec
from agent_runtime.executor.init.channel import Message, StartRequest, close_all
from agent_runtime.executor.init.init import CRASHED
from agent_runtime.executor.overlay.pausing import Pause
from agent_runtime.executor.overlay.peer import Peer, PeerClosed
from agent_runtime.executor.overlay.usage import Usage, resident_bytes

if TYPE_CHECKING:
    from agent_runtime.executor.overlay.hosts import Host

# An init only forks and forwards. If it does not answer for this long, it has stopped working.
_ANSWER_SECONDS = 30.0
# Before a workspace over its limits is killed from outside, its init gets this long to kill its processes.
_KILL_SECONDS = 2.0
_READS = frozenset({"read", "stat", "list", "tar", "snapshot"})
_MAX_TEXT = 2000


def _text(message: Message, key: str) -> str:
    value = message.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else "?"


def _whole(message: Message, key: str, low: int, high: int) -> int | None:
    value = message.get(key)
    return value if type(value) is int and low <= value <= high else None


def _failure(message: Message) -> FileFailure:
    return FileFailure(_whole(message, "errno", 0, 4096) or 0, _text(message, "path"), _text(message, "error"))


class Command:
    """A command and its process tree. `pid` is its number inside the workspace."""

    def __init__(self, workspace: Workspace, number: int, watcher: Watcher, *, is_lasting: bool) -> None:
        self.pid = 0
        self.since = math.inf if is_lasting else time.monotonic()
        """Since when others wait for its end; infinite for a server."""
        self._workspace, self._number = workspace, number
        # None when there are no further notifications.
        self._watcher: Watcher | None = watcher
        self._cause: str | None = None
        # The time of the request; None when it is decided whether the command was started.
        self.asked_at: float | None = asyncio.get_running_loop().time()

    def handle(self, message: Message, descriptors: list[int]) -> None:
        """Handle a message of its subreaper or init: it has started, failed to start, or ended. A short command reports
        start and end in one message.
        """
        close_all(descriptors)
        if self._watcher is None:
            return
        lost = _whole(message, "lost", 1, 64)
        if lost is not None:
            # A tool has killed its subreaper. Report the command as ended, even if its start was not reported: a tool
            # must not be able to make its failure look like the executor's.
            self.end(None, lost)
            return
        code, number = _whole(message, "code", 0, 255), _whole(message, "signal", 1, 64)
        if not self.pid:
            pid = _whole(message, "pid", 1, 2**22)
            if pid is None:
                self.refuse(_failure(message))
                return
            self.pid = pid
            self.asked_at = None
            if code is None and number is None:
                self._watcher.started()
        if code is not None or number is not None:
            self.end(code if number is None else None, number)

    def set_cause(self, cause: str | None) -> None:
        """Set why it will end, unless a cause is set."""
        self._cause = self._cause or cause

    def end(self, code: int | None, number: int | None) -> None:
        if self._cause is None:
            # Also of a command that ends with 0: a shell's may have lost one of its programs.
            self.set_cause(self._workspace.host.watch.killed_by_kernel(self._workspace))
        if self._cause is None and self._workspace.host.is_disk_full:
            # Finding the cause kills its subreaper too; that must not be reported as another end.
            self._workspace.forget(self._number)
            self._workspace.run_in_background(self._end_on_full_disk(code, number))
        elif watcher := self._finish():
            watcher.ended(Exit(code, number, self._cause))

    async def _end_on_full_disk(self, code: int | None, number: int | None) -> None:
        self.set_cause(await self._workspace.host.cause_of_full_disk(self._workspace))
        self.end(code, number)

    def refuse(self, failure: FileFailure | WorkspaceFailure) -> None:
        """Report that the command cannot be started."""
        if watcher := self._finish():
            watcher.refused(failure)

    def lose(self, failure: WorkspaceFailure) -> None:
        """Mark the command as ended, because the workspace has ended."""
        self.set_cause(failure.cause)
        if self.asked_at is None:
            self.end(None, signal.SIGKILL)
        else:
            self.refuse(failure)

    def _finish(self) -> Watcher | None:
        self._workspace.forget(self._number)
        watcher, self._watcher = self._watcher, None
        return watcher

    async def signal(self, number: int, *, tree: bool, cause: str | None = None) -> None:
        """Send a signal to the command, or to its whole tree, including orphans that left its session."""
        self.set_cause(cause)
        arguments = {"command": self._number, "pid": self.pid, "number": int(number), "tree": tree}
        await self._workspace.request({"do": "signal", "arguments": arguments})


class InitProcess(NamedTuple):
    """The init of a workspace. `process` is its pid descriptor, `pid` its number in this namespace.

    `proc` and `shm` are descriptors of the folders that list its processes and its files in memory. In `Plain`, `proc`
    is the host's and `shm` None. `shared` has the descriptors of `view.Shared`, if others may join it.
    """

    peer: Peer
    process: int
    pid: int
    proc: int
    shm: int | None
    shared: tuple[int, ...]


class Ports(Protocol):
    """Whoever listens in a workspace's network."""

    @property
    def may_be_closed(self) -> bool:
        """Whether no program waits for an answer at one of them."""

    def close_ports(self) -> None:
        """Close the ports, because the network ends."""

    async def open_ports(self, listen: Callable[[int], Awaitable[int | None]]) -> None:
        """Open them again; `listen` is like `Workspace.listen`. Raises FileFailure, WorkspaceFailure."""


class Workspace:
    """One workspace. `layer` is the name of its layer's folder (empty in `Plain`).

    A workspace without processes rests after a while: its init ends, and the next request makes another one over the
    same layer.
    """

    proc: int
    shm: int | None
    shared: tuple[int, ...]

    def __init__(self, host: Host, spec: WorkspaceSpec, init: InitProcess, layer: str) -> None:
        self.spec = spec
        self.failed: asyncio.Future[WorkspaceFailure] = asyncio.get_running_loop().create_future()
        self.layer = layer
        self.unasked_end = host.unasked_end
        self.frozen = False
        # The workspaces that share its network, itself included.
        self.members = {self}
        self.pause = Pause()
        self.created = asyncio.get_running_loop().time()
        self.has_filled_disk = False
        self.last = Usage()
        self.host = host
        self.numbers = init.peer.numbers
        self.ports: Ports | None = None
        self.rest_timer: asyncio.TimerHandle | None = None
        self.is_resting = False
        # Held while it begins or ends to rest, and while it ends.
        self._changing = asyncio.Lock()
        self._commands: dict[int, Command] = {}
        # Numbers of commands that wait until they are sent to init.
        self._unsent: set[int] = set()
        self._helpers: set[asyncio.Task[None]] = set()
        self._file_operations = 0
        self._ending: asyncio.Task[None] | None = None
        self._cause = self.unasked_end
        self._attach(init)

    def _attach(self, init: InitProcess) -> None:
        peer = init.peer
        self._peer, self.proc, self.shm, self.shared = peer, init.proc, init.shm, init.shared
        self._process: int | None = init.process
        # Init's pid in this namespace, and in `proc`.
        self.init_pid, self.inner_init = init.pid, 1 if self.host.isolates else init.pid
        self.init_bytes = resident_bytes(self.proc, self.inner_init)
        peer.listen(CRASHED, self._crashed)

        def lost(gone: asyncio.Future[str]) -> None:
            if not self.is_resting and peer is self._peer:
                self._lost(gone.result())

        peer.gone.add_done_callback(lost)
        # In `Plain`, init's children outlive it and keep the channel open, so also watch init itself.
        asyncio.get_running_loop().add_reader(init.process, self._init_ended)

    @property
    def is_live(self) -> bool:
        """Whether its init runs and is not ending."""
        return self._ending is None and not self.is_resting

    def stop_rest_timer(self) -> None:
        """Forget when it would rest."""
        if self.rest_timer is not None:
            self.rest_timer.cancel()
            self.rest_timer = None

    async def rest(self) -> None:
        """End its init, and with it its memory, if nothing in it would be lost."""
        async with self._changing:
            with contextlib.suppress(WorkspaceFailure):
                if not self._may_rest():
                    return
                reply, received = await self.request({"do": "idle"}, _KILL_SECONDS)
                close_all(received)
                if reply.get("is_idle") is not True or not self._may_rest():
                    return
                assert self.shm is not None  # `Plain` never rests
                if self.ports is not None:
                    self.ports.close_ports()
                peer, process, handles = self._peer, self._process, [self.proc, self.shm]
                self.is_resting, self._process, self.proc, self.shm = True, None, self.host.proc, None
                assert process is not None  # it lives
                asyncio.get_running_loop().remove_reader(process)
                peer.close("it rests")
                await self.host.end_init(self, process)
                close_all([process, *handles])
                self.last = Usage(disk_bytes=self.last.disk_bytes)

    def _may_rest(self) -> bool:
        is_alone = self.members == {self} and not self.spec.shares and self.spec.joins is None
        is_live = self._ending is None and not (self.frozen or self.is_resting)
        has_ports = self.ports is not None and not self.ports.may_be_closed
        is_busy = self.busy or has_ports or self.host.watch.is_active(self)
        return is_live and is_alone and not is_busy and self.shm is not None and not os.listdir(self.shm)

    async def _awake(self) -> None:
        """End the rest, if it rests. Raises WorkspaceFailure."""
        if not (self.is_resting or self._changing.locked()):
            return
        async with self._changing:
            if not self.is_resting or self._ending is not None:
                return
            try:
                self._attach(await self.host.wake(self))
            except WorkspaceFailure as failure:
                if self.host.is_disk_full:
                    raise WorkspaceFailure(await self.host.cause_of_full_disk(self), failure.message) from None
                raise
            try:
                if self.ports is not None:
                    await self.ports.open_ports(self._listen)
            finally:
                self.is_resting = False
                self.host.rest_later(self)

    def start(
        self, request: StartRequest, watcher: Watcher, descriptors: Sequence[int], *, is_lasting: bool = False
    ) -> Command:
        """Request the start of a command. `watcher` is notified of the result. `is_lasting`: it has no deadline.

        `descriptors` are its standard streams, and are closed by this call. For a terminal, all three are the slave end
        from `open_terminal`. Raises FileFailure and WorkspaceFailure for requests that cannot succeed.
        """
        request = request._replace(env={**self.spec.env, **request.env})
        try:
            self._refuse_if_frozen("a command")
            _refuse_nul(request)
        except (FileFailure, WorkspaceFailure):
            close_all(sorted(set(descriptors)))
            raise
        number = next(self.numbers)
        command = self._commands[number] = Command(self, number, watcher, is_lasting=is_lasting)
        self.host.watch.admit(self)
        if self.is_resting or self._changing.locked() or self.pause.is_on:
            self._unsent.add(number)
            self.run_in_background(self._start_later(command, number, request, descriptors))
            return command
        self._peer.listen(number, command.handle)
        try:
            is_asked = self._peer.start_now(number, request, descriptors)
        except PeerClosed as gone:
            is_asked = True
            command.refuse(self._gone(gone))
        if is_asked:
            close_all(sorted(set(descriptors)))
        else:
            self._unsent.add(number)
            self.run_in_background(self._start_later(command, number, request, descriptors))
        return command

    async def _start_later(
        self, command: Command, number: int, request: StartRequest, descriptors: Sequence[int]
    ) -> None:
        try:
            command.asked_at = math.inf
            await self.pause.wait()
            command.asked_at = asyncio.get_running_loop().time()
            await self._awake()
            if number not in self._commands:
                return  # it has ended meanwhile, with all processes or with its workspace
            self._unsent.discard(number)
            self._peer.listen(number, command.handle)
            self.host.watch.add(self)
            await self._peer.start(number, request, descriptors)
        except PeerClosed as gone:
            command.refuse(self._gone(gone))
        except (WorkspaceFailure, FileFailure) as failure:
            command.refuse(failure)
        finally:
            self._unsent.discard(number)
            close_all(sorted(set(descriptors)))

    def end_unreported(self) -> None:
        """End commands whose start was not reported for too long."""
        latest = asyncio.get_running_loop().time() - _ANSWER_SECONDS
        for command in self._commands.values():
            if command.asked_at is not None and command.asked_at < latest:
                command.asked_at = math.inf
                self.run_in_background(self._end_unreported_command(command))

    async def _end_unreported_command(self, command: Command) -> None:
        try:
            await command.signal(signal.SIGKILL, tree=True)
        except WorkspaceFailure as failure:
            command.refuse(failure)
        else:
            command.end(None, signal.SIGKILL)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    def forget(self, number: int) -> None:
        """Remove an ended command."""
        self._commands.pop(number, None)
        self._peer.forget(number)

    async def open_terminal(self, rows: int, columns: int) -> tuple[int, int]:
        """Open a pseudo terminal of the workspace's own devpts; return (master, slave) descriptors."""
        self._refuse_if_frozen("a terminal")
        await self._awake()
        master, slave = await self._descriptors({"do": "terminal", "rows": rows, "columns": columns}, 2)
        if not (os.isatty(master) and os.isatty(slave)):
            close_all([master, slave])
            raise WorkspaceFailure("WorkspaceEnded", "the workspace's init sent a descriptor that is not a terminal")
        return master, slave

    async def listen(self, port: int) -> int | None:
        """Return a descriptor that listens for TCP on the workspace's own loopback; `port` 0 is any free one.

        None if the workspace has no network namespace (`Plain`).
        """
        self._refuse_if_frozen("a port")
        if not self.host.isolates:
            return None
        await self._awake()
        return await self._listen(port)

    async def _listen(self, port: int) -> int:
        descriptor = (await self._descriptors({"do": "listen", "port": port}, 1))[0]
        if not _is_listening(descriptor):
            os.close(descriptor)
            raise WorkspaceFailure("WorkspaceEnded", "the workspace's init sent a descriptor that does not listen")
        return descriptor

    async def _descriptors(self, message: Message, count: int) -> list[int]:
        reply, received = await self.request(message)
        if len(received) != count:
            close_all(received)
            raise _failure(reply) if "error" in reply else self._silent()
        return received

    async def file(self, operation: str, arguments: Mapping[str, Any], stream: int | None = None) -> dict[str, Any]:
        """Run a file operation inside; docs/workspaces.md lists operations, arguments and replies.

        `stream` is the pipe end from which it reads its body, or to which it writes; this call closes it. Raises
        FileFailure and WorkspaceFailure.
        """
        if self.frozen:
            if operation not in _READS:
                close_all([] if stream is None else [stream])
                self._refuse_if_frozen(f"the file operation {operation!r}")
            return await self.host.read_frozen(self, operation, arguments, stream)
        self._file_operations += 1
        try:
            await self._awake()
        except BaseException:
            self._file_operations -= 1
            close_all([] if stream is None else [stream])
            raise
        number = self._peer.number()
        message = {"do": "file", "operation": operation, "arguments": dict(arguments)}
        answer = self._peer.expect(number)
        try:
            try:
                self.host.watch.add(self)
                await self._peer.send(number, message, [] if stream is None else [stream])
            finally:
                if stream is not None:
                    os.close(stream)
            reply, received = await answer
        except PeerClosed as gone:
            raise self._gone(gone) from None
        except asyncio.CancelledError:
            with contextlib.suppress(PeerClosed):
                await self._peer.send(self._peer.number(), {"do": "cancel", "request": number})
            raise
        finally:
            self._file_operations -= 1
            self._peer.forget(number)
            answer.cancel()
        close_all(received)
        if "lost" in reply:
            if (killed := self.host.watch.killed_by_kernel(self)) is not None:
                why = f"the kernel has ended {operation} because the sandbox's memory was used up"
                raise WorkspaceFailure(killed, why)
            failure = FileFailure(
                errno.EINTR, str(arguments.get("path", "/")), f"{operation} was killed inside the workspace"
            )
        elif "error" in reply:
            failure = _failure(reply)
        else:
            return reply
        # Finding the workspace that filled the disk kills other file operations.
        if failure.errno in (errno.ENOSPC, errno.EINTR) and self.host.is_disk_full:
            raise WorkspaceFailure(await self.host.cause_of_full_disk(self), failure.message)
        raise failure

    async def request(self, message: Message, seconds: float = _ANSWER_SECONDS) -> tuple[Message, list[int]]:
        """Send a request to init. Raises WorkspaceFailure if it has ended or does not answer in time."""
        try:
            async with asyncio.timeout(seconds):
                return await self._peer.ask(message)
        except PeerClosed as gone:
            raise self._gone(gone) from None
        except TimeoutError:
            raise self._silent() from None

    def _refuse_if_frozen(self, what: str) -> None:
        if self.frozen:
            raise WorkspaceFailure(
                "Frozen", f"workspace {self.spec.id!r} is frozen and does not accept {what}; fork it"
            )

    def _gone(self, gone: PeerClosed) -> WorkspaceFailure:
        if self.failed.done():
            return self.failed.result()
        return WorkspaceFailure(self._cause, f"workspace {self.spec.id!r} has ended: {gone}")

    def _silent(self) -> WorkspaceFailure:
        return WorkspaceFailure(
            self._cause, f"the init of workspace {self.spec.id!r} does not answer; destroy the workspace"
        )

    async def freeze(self) -> None:
        """End its processes and make its layer read-only, as a base for forks. Raises WorkspaceFailure in `Plain`."""
        if not self.host.isolates:
            problem = "Plain mode cannot freeze: its files are the container's own; use a snapshot"
            raise WorkspaceFailure("CreateFailed", problem)
        if not self.frozen:
            await self.stop()
            self.frozen = True

    @property
    def busy(self) -> bool:
        """Mark the workspace as active while an operation runs."""
        return bool(self._commands) or self._file_operations > 0

    @property
    def oldest_command(self) -> float:
        """Return since when its oldest command runs or waits for its start; infinite without one."""
        return min((command.since for command in self._commands.values()), default=math.inf)

    def commands(self) -> tuple[int, int]:
        """Return the number of commands that have started, and of those that have not."""
        started = sum(command.asked_at is None for command in self._commands.values())
        return started, len(self._commands) - started

    def usage(self) -> dict[str, int]:
        """Return the last observed `memoryBytes`, `processes`, `diskBytes`."""
        last = self.last
        return {"memoryBytes": last.memory_bytes, "processes": last.processes, "diskBytes": last.disk_bytes}

    def layers(self) -> list[str]:
        """Return the ids of the frozen workspaces below it, nearest first."""
        return self.host.ancestors(self)

    async def kill_processes(self) -> None:
        """Have its init kill all processes. Raises WorkspaceFailure."""
        if not self.is_resting:
            await self.request({"do": "kill"})

    async def stop_excess(self, cause: str) -> None:
        """Kill all its processes because it exceeds the limit `cause`; if its init is too slow, also the workspace."""
        with contextlib.suppress(WorkspaceFailure):
            await self.end_processes(cause, _KILL_SECONDS, failed_as=cause)

    async def end_processes(
        self, cause: str, seconds: float = _ANSWER_SECONDS, *, failed_as: str | None = None
    ) -> None:
        """Kill all its processes, including daemons of commands that have ended. Raises WorkspaceFailure, after failing
        the workspace, if its init does not respond in time.
        """
        for number, command in list(self._commands.items()):
            command.set_cause(cause)
            if number in self._unsent:  # it would start after the others have ended
                command.end(None, signal.SIGKILL)
        if self.is_resting:
            return
        try:
            await self.request({"do": "kill"}, seconds)
        except WorkspaceFailure as failure:
            await self.fail(failed_as or failure.cause, failure.message)
            raise

    async def fail(self, cause: str, message: str) -> None:
        """End the workspace and all its processes; later callers get the reason."""
        if self._ending is None:
            self.failed.set_result(WorkspaceFailure(cause, message))
        await self.stop(cause)

    async def stop(self, cause: str = "WorkspaceEnded") -> None:
        """Kill its init, and with it all processes; returns when all have ended. Idempotent."""
        if self._ending is None:
            self._cause = cause
            self._ending = asyncio.create_task(self._stop())
        await asyncio.shield(self._ending)

    async def _stop(self) -> None:
        async with self._changing:
            await self._end_init()

    async def _end_init(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            asyncio.get_running_loop().remove_reader(process)
            await self.host.end_init(self, process)
            os.close(process)
        self._peer.close("it was stopped")
        if self.shm is not None:  # otherwise `proc` is the host's
            close_all([self.proc, self.shm, *self.shared])
            self.shared = ()
        self.last = Usage(disk_bytes=self.last.disk_bytes)

    def _init_ended(self) -> None:
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process)
        self._peer.finish("its init has ended")

    def _crashed(self, message: Message, descriptors: list[int]) -> None:
        """Handle init's report of a defect in its code."""
        close_all(descriptors)
        if self._ending is None:
            self._cause = "WorkspaceEnded"
            self._peer.close(f"its init failed: {_text(message, 'crashed')}")

    def _lost(self, reason: str) -> None:
        """Handle the end of its init."""
        if self._ending is None and (killed := self.host.watch.killed_by_kernel(self)) is not None:
            self._cause, reason = killed, "the kernel has ended its init because the sandbox's memory was used up"
        if self._cause == "Attacked":
            reason = "a tool has killed its init"
        failure = WorkspaceFailure(self._cause, f"workspace {self.spec.id!r} has ended: {reason}")
        for command in list(self._commands.values()):
            command.lose(failure)
        self.host.watch.remove(self)
        if self._ending is None:
            self._ending = asyncio.create_task(self._stop())
            if not self.failed.done():
                self.failed.set_result(failure)

    async def destroy(self) -> None:
        """End all its processes and remove its layer."""
        await self.stop()
        await self.host.forget(self)


def _is_listening(descriptor: int) -> bool:
    """Whether the descriptor is a listening TCP socket of a loopback."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            is_tcp = found.family == socket.AF_INET and found.type == socket.SOCK_STREAM
            return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _refuse_nul(request: StartRequest) -> None:
    argv = request.argv
    for text in [*([argv] if isinstance(argv, str) else argv), *request.env, *request.env.values()]:
        if "\0" in text:
            raise FileFailure(22, text[:80], "a NUL byte in argv or env: programs cannot receive one; put it in a file")
    if not argv:
        raise FileFailure(22, "argv", "argv is empty: a program and its arguments expected")


class Spawned:
    """A started command. Implements `Watcher`; `settled` resolves when it has started, and `exited` when it has ended."""

    child: Command

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()

    def started(self) -> None:
        self.settled.set_result(None)

    def refused(self, failure: FileFailure | WorkspaceFailure) -> None:
        self.settled.set_exception(failure)

    def ended(self, exit: Exit) -> None:
        if not self.settled.done():
            self.settled.set_result(None)
        self.exited.set_result(exit)


async def spawn(workspace: Workspace, request: StartRequest, streams: Sequence[int]) -> Spawned:
    """Start a command, as `Workspace.start` does, and return when it has started. Raises FileFailure and
    WorkspaceFailure.
    """
    spawned = Spawned()
    spawned.child = workspace.start(request, spawned, streams)
    await spawned.settled
    return spawned
