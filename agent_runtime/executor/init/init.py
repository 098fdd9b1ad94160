"""The process that serves one workspace from inside: forks a child for each command and file operation, and reaps them.

In `Overlay` it is PID 1 of the workspace's own namespaces, in `Plain` an ordinary process and subreaper. It executes no
programs, imports no modules inside a workspace (they would come from the image), and has no secrets. When the executor
closes its end of the channel, this process and all processes of the workspace end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

from agent_runtime.executor import kernel
from agent_runtime.executor.init import commands, files, processes
from agent_runtime.executor.init.channel import Channel, Message, close_all
from agent_runtime.executor.init.commands import SubreaperState, WorkspaceSettings

_BACKLOG = 128
# Stops of one child after which a tool must be the cause. A suspension has two; a command has rarely many of these.
_MOST_STOPS = 100
# The number of init's message about its own failure. Requests have numbers from 1 to 2**32 - 2.
CRASHED = 2**32 - 1


class Init:
    """The main loop, with a record of which child works for which request."""

    def __init__(self, channel: Channel, starts: Channel, workspace: WorkspaceSettings, proc: int) -> None:
        self._channel = channel
        self._starts = starts
        self._workspace = workspace
        self._proc = proc
        self._state = SubreaperState(channel, starts)
        # Request number by child process, for file operations; then the subreapers that wait or have just started; then
        # the busy ones.
        self._helpers: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._busy: set[int] = set()
        self._continued: Counter[int] = Counter()
        """Stops of each child, since it began its command."""
        self._poll = select.poll()

    def serve(self) -> NoReturn:
        """Answer requests until the executor disconnects."""
        if not self._workspace.isolated:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        sys.path.clear()
        sys.meta_path.clear()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for source in (self._channel.end.fileno(), self._starts.end.fileno(), self._state.note_reader, wake_read):
            self._poll.register(source, select.POLLIN)
        try:
            self._serve(wake_read)
        except Exception as error:  # noqa: BLE001 - nothing else would report the failure
            self._channel.send(CRASHED, {"crashed": f"{type(error).__name__}: {error}"})
            os._exit(1)

    def _serve(self, wake_read: int) -> NoReturn:
        self._workspace.make_working_folder()
        self._fork_subreaper()
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            self._read_notes()
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                self._reap()
            if self._starts.end.fileno() in ready and not self._waiting:
                self._fork_subreaper()
            if self._channel.end.fileno() in ready:
                received = self._channel.receive()
                if received is None:
                    self._shut_down()
                self._handle(*received)

    def _shut_down(self) -> NoReturn:
        if not self._workspace.isolated:
            self._kill_all()
        os._exit(0)

    def _handle(self, number: int, request: Message, descriptors: list[int]) -> None:
        reply: Message | None = None
        try:
            match request["do"]:
                case "file":
                    self._fork_helper(number, request, descriptors)
                case "signal":
                    reply = {"sent": self._signal(**request["arguments"])}
                case "cancel":
                    for helper in [helper for helper, work in self._helpers.items() if work == request["request"]]:
                        processes.send(helper, signal.SIGKILL)
                case "idle":
                    reply = {"is_idle": self._is_idle()}
                case "kill":
                    reply = {"gone": self._kill_all()}
                case "terminal":
                    self._open_terminal(number, request["rows"], request["columns"])
                case "listen":
                    self._listen(number, request["port"])
        except OSError as error:
            reply = {
                "errno": error.errno or errno.EIO,
                "path": request["do"],
                "error": f"{request['do']}: {error.strerror}",
            }
        finally:
            close_all(descriptors)
        if reply is not None:
            self._channel.send(number, reply)

    def _fork(self, work: Callable[[], NoReturn]) -> int:
        pid = os.fork()
        return pid or self._in_child(work)

    def _in_child(self, work: Callable[[], NoReturn]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kernel.hide_from_tools()
            work()
        finally:
            os._exit(1)

    def _fork_helper(self, number: int, request: Message, descriptors: list[int]) -> None:
        pid = self._fork(lambda: files.run(self._channel, number, request, descriptors, self._workspace))
        self._helpers[pid] = number

    def _fork_subreaper(self) -> None:
        """Fork a subreaper for the next command; it reads the request itself."""
        own = os.geteuid(), os.getegid()
        forked = commands.fork_native(self._state, self._workspace)
        if forked is None:
            forked = self._fork(lambda: commands.run(self._state, self._workspace, own))
        elif not isinstance(forked, int):
            self._in_child(lambda: commands.run(self._state, self._workspace, own, forked))
        self._set_waiting(self._waiting | {forked})

    def _read_notes(self) -> None:
        """Update which subreapers are busy and which wait."""
        waiting = set(self._waiting)
        for pid, is_busy in self._state.notifications():
            self._continued.pop(pid, None)
            (self._busy if is_busy else waiting).add(pid)
            (waiting if is_busy else self._busy).discard(pid)
        self._set_waiting(waiting)

    def _set_waiting(self, waiting: set[int]) -> None:
        """Set the waiting subreapers. While one waits, this process does not poll for requests."""
        if waiting and not self._waiting:
            self._poll.unregister(self._starts.end)
        elif self._waiting and not waiting:
            self._poll.register(self._starts.end, select.POLLIN)
        self._waiting = waiting

    def _reap(self) -> None:
        orphaned = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                break
            if not pid:
                break
            self._read_notes()
            if os.WIFSTOPPED(status):
                if pid in self._helpers or pid in self._subreapers():
                    self._continue(pid)
                continue
            self._continued.pop(pid, None)
            number = self._helpers.pop(pid, 0) or self._state.pid_table[pid]
            self._state.pid_table[pid] = 0
            self._busy.discard(pid)
            self._set_waiting(self._waiting - {pid})
            if number and status != 0:
                # A tool ended a subreaper or helper. Its command's processes are now our children, and are killed too.
                orphaned = True
                signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGKILL
                self._channel.send(number, {"lost": int(signal_number)})
        if orphaned:
            processes.kill_below(self._proc, os.getpid(), spared=frozenset({*self._helpers, *self._subreapers()}))

    def _continue(self, pid: int) -> None:
        """Continue a child that was stopped: it can neither start commands nor report. A batch system stops all processes
        of a job (SIGTSTP, SIGSTOP), perhaps its children before this one; a tool that stops them again and again ends
        its workspace's processes.
        """
        self._continued[pid] += 1
        if self._continued[pid] > _MOST_STOPS:
            self._kill_all()
        else:
            processes.send(pid, signal.SIGCONT)

    def _subreapers(self) -> set[int]:
        return self._waiting | self._busy

    def _signal(self, command: int, pid: int, number: int, tree: bool) -> bool:
        """Signal the command that request `command` started; False if it has ended."""
        subreaper = next((pid for pid in self._subreapers() if self._state.pid_table[pid] == command), None)
        if subreaper is None:
            return False
        # A stopped subreaper cannot start the next command, which the signal would reach too. It is always continued
        # afterwards.
        processes.hold(self._proc, subreaper)
        try:
            if self._state.pid_table[subreaper] != command:
                return False
            if tree and number == signal.SIGKILL:
                return processes.kill_below(self._proc, subreaper)
            all_processes = processes.all_processes(self._proc)
            below = processes.descendants(all_processes, subreaper)
            chosen = below if tree else [found for found in below if found.pid == pid and found.parent == subreaper]
            for process in chosen:
                processes.send(process.pid, number)
            return bool(chosen)
        finally:
            processes.send(subreaper, signal.SIGCONT)

    def _kill_all(self) -> bool:
        if self._workspace.isolated:
            # One call signals every other process of the namespace; none can escape by forking.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        # Wait until all have ended: a dying subreaper may still take a request.
        return processes.kill_below(self._proc, os.getpid())

    def _is_idle(self) -> bool:
        """Whether nothing would be lost with this process: no tools, no memory segments, semaphores or queues."""
        others = {process.pid for process in processes.all_processes(self._proc)} - {os.getpid(), *self._subreapers()}
        kept = (processes.read_entry(self._proc, f"sysvipc/{kind}") for kind in ("shm", "sem", "msg"))
        # The first line has the names of the columns.
        return not others and all(content.count(b"\n") <= 1 for content in kept)

    def _open_terminal(self, number: int, rows: int, columns: int) -> None:
        master, slave = os.openpty()
        try:
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            self._channel.send(number, {}, [master, slave])
        finally:
            close_all([master, slave])

    def _listen(self, number: int, port: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(_BACKLOG)
            self._channel.send(number, {}, [listener.fileno()])
