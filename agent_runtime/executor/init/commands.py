"""Start commands, each under its own subreaper. Runs in a process forked by init.

The kernel makes the subreaper the parent of all orphaned descendants of the command, also after setsid and double
forks. So a signal to a command's process tree never reaches another command's processes. The subreaper reports the end
of the command itself, even if descendants still run. When its last descendant has ended, it takes the next command,
because forking another subreaper would cost more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import resource
import signal
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from agent_runtime.executor import kernel
from agent_runtime.executor.init.channel import (
    HEADER_BYTES,
    Channel,
    Message,
    StartRequest,
    close_all,
    encode,
    packets,
    unpack,
)
from agent_runtime.executor.init.identity import Accounts, Identity, Refused, become
from agent_runtime.executor.init.native import NativeSubreaper, fork_subreaper

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A subreaper's message to init: its process, and whether it is busy.
NOTE = struct.Struct("=II")
# linux/threads.h: process ids are below 4 Mi.
_PROCESS_IDS = 1 << 22
_PEEKED_BYTES = 65_536
# Delay of a start's report. A small program ends within 1 to 2 ms, so its start and end are one message.
_SOON_SECONDS = 0.005
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
# Python ignores these two; a command expects their defaults.
_RESTORED_SIGNALS = {signal.SIGPIPE, signal.SIGXFSZ}


class WorkspaceSettings(NamedTuple):
    """Settings of the workspace that init and its children need."""

    isolated: bool
    root: str = ""
    user: str = "0"
    working_dir: str = "/"
    nice: int = 0
    environment: Mapping[str, str] = {}
    rlimits: Mapping[int, int] = {}
    layer: tuple[tuple[str, int], ...] = ()

    def locate(self, path: str) -> str:
        """Return the path in this process of a path in the workspace. Relative paths start at the working folder."""
        return (
            self.root + os.path.normpath("/" + os.path.join(self.working_dir, path))
            if self.root
            else os.path.join(self.working_dir, path)
        )

    def make_working_folder(self) -> None:
        """Create the working folder if it is missing, for the default user, who may lack the rights to create it.

        Ignores failures: a command that needs the folder reports them.
        """
        folder = os.path.normpath(self.locate("."))
        missing = []
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        with contextlib.suppress(OSError, Refused):
            for path in reversed(missing):
                os.mkdir(path, 0o755)
            if missing:
                identity = Accounts((os.geteuid(), os.getegid())).look_up(self.user)
                os.chown(missing[0], identity.uid, identity.gid)

    def apply_limits(self) -> None:
        """Apply the workspace's per-process limits to this process and its children."""
        for which, value in self.rlimits.items():
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


class SubreaperState:
    """State that init and the subreapers of its workspace share.

    Subreapers report to `channel`. Requests come from `starts`, which one process reads at a time: the one with the
    lock on `turn`. The kernel releases the lock when that process dies. `pid_table`, in shared memory, has the request
    number of each subreaper. A subreaper notifies init through the pipe `note_writer` when a command runs longer than
    _SOON_SECONDS, and when it waits for requests again.
    """

    def __init__(self, channel: Channel, starts: Channel) -> None:
        self.channel, self.starts = channel, starts
        self.note_reader, self.note_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.turn = os.memfd_create("turn", os.MFD_CLOEXEC)
        self.is_bounded = False
        """This process can no longer start programs that gain rights."""
        # Most pages are never written, and use no memory.
        self.pid_table = memoryview(mmap.mmap(-1, _PROCESS_IDS * 4)).cast("I")

    def notify(self, is_busy: bool) -> None:
        """Notify init that this process is busy, or waits for requests again."""
        os.write(self.note_writer, NOTE.pack(os.getpid(), is_busy))

    def notifications(self) -> Iterator[tuple[int, bool]]:
        """Yield the notifications since the last call."""
        with contextlib.suppress(BlockingIOError):
            while note := os.read(self.note_reader, NOTE.size):
                pid, is_busy = NOTE.unpack(note)
                yield pid, bool(is_busy)


def fork_native(state: SubreaperState, workspace: WorkspaceSettings) -> int | NativeSubreaper | None:
    """Fork a subreaper that handles ordinary commands in C; `fork_subreaper` describes the result."""
    variables = [f"{name}={value}" for name, value in workspace.environment.items()]
    return fork_subreaper(
        (
            *(state.channel.end.fileno(), state.starts.end.fileno(), state.note_writer, state.turn),
            kernel.address(state.pid_table),
            # The C code supports absolute folders only if workspace paths are also this process's paths.
            int(not workspace.root),
            workspace.nice,
            workspace.user,
            workspace.locate("."),
            *(len(workspace.rlimits), *itertools.chain.from_iterable(workspace.rlimits.items())),
            *(len(_SHELLS), *_SHELLS),
            *(len(variables), *variables),
        )
    )


def run(
    state: SubreaperState,
    workspace: WorkspaceSettings,
    forked_as: tuple[int, int],
    native: NativeSubreaper | None = None,
) -> NoReturn:
    """Start commands one after the other and report on each; with `native`, only those that the C code does not
    support.

    `forked_as` are uid and gid of this process when it was forked.
    """
    accounts = Accounts(forked_as)
    if native is None:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        workspace.apply_limits()
        _touch_memory(accounts, workspace)
        fcntl.lockf(state.turn, fcntl.LOCK_EX)
    while True:
        refused = native.not_started() if native else None
        number, pid, report = _report_not_executable(*refused) if refused else _next(state, workspace, accounts)
        if not _report_and_reap(state, number, pid, report) or state.is_bounded:
            os._exit(0)
        if native and not native.serve():
            os._exit(0)


def _next(state: SubreaperState, workspace: WorkspaceSettings, accounts: Accounts) -> tuple[int, int, Message]:
    """Wait for a request and start its command; return its number, the command's process id (0: not started) and its
    report.
    """
    received = state.starts.receive_content() if _can_serve_next(state.starts, accounts, workspace) else None
    if received is None:
        os._exit(0)
    number, content, descriptors = received
    state.pid_table[os.getpid()] = number
    fcntl.lockf(state.turn, fcntl.LOCK_UN)
    try:
        request = unpack(content)
        if request.bounded:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            state.is_bounded = True
        pid = _start(request, descriptors, workspace, accounts)
        return number, pid, {"pid": pid}
    except Refused as refusal:
        return number, 0, _refusal_report(refusal)
    finally:
        close_all(descriptors)


def _report_not_executable(number: int, request: StartRequest, error: int) -> tuple[int, int, Message]:
    return number, 0, _refusal_report(_not_executable(OSError(error, os.strerror(error)), request.argv))


def _refusal_report(refusal: Refused) -> Message:
    return {"errno": refusal.errno, "path": refusal.path, "error": refusal.message}


def _report_and_reap(state: SubreaperState, number: int, command: int, report: Message) -> bool:
    """Report the command's start (`report`) and end. When all its descendants have ended, return whether this process
    waits for the next request.

    Most commands end soon without descendants. Their start and end are one message, sent after this process has begun
    to wait: the receiver may start the next command at once, and init would otherwise fork another subreaper.
    """
    is_busy = False
    if command:
        signal.sigtimedwait({signal.SIGCHLD}, _SOON_SECONDS)
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG if report else 0)
        except ChildProcessError:
            is_next = _take_turn(state)
            state.pid_table[os.getpid()] = 0
            if is_next and is_busy:
                state.notify(False)
            if report:
                state.channel.send(number, report)
            return is_next
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
            report |= {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        elif not ended:
            if not is_busy:
                is_busy = True
                state.notify(True)
            state.channel.send(number, report)
            report = {}


def _take_turn(state: SubreaperState) -> bool:
    """Become the process that reads the next request; False if another process already is."""
    try:
        fcntl.lockf(state.turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _can_serve_next(starts: Channel, accounts: Accounts, workspace: WorkspaceSettings) -> bool:
    """Wait for a request; return whether this process can become the command's user.

    A process that has given up root can only start commands of the same user, and cannot hand over a terminal. It
    leaves other requests to a new process.
    """
    if os.geteuid() == 0:
        return True
    packet = starts.end.recv(_PEEKED_BYTES, socket.MSG_PEEK)
    try:
        request = unpack(packet[HEADER_BYTES:])
        identity = accounts.look_up(request.user or workspace.user)
    except (ValueError, Refused):
        return False
    return not request.tty and _runs_as(identity)


def _runs_as(identity: Identity) -> bool:
    """Whether this process already runs as that user."""
    forked_as = os.getegid()
    groups = [forked_as, *sorted(set(os.getgroups()) - {forked_as})]
    return (identity.uid, identity.gid, list(identity.groups)) == (os.geteuid(), forked_as, groups)


def _touch_memory(accounts: Accounts, workspace: WorkspaceSettings) -> None:
    """Copy the memory pages that a request will need before one arrives, to save time later."""
    with contextlib.suppress(Refused):
        packets(0, encode({"code": 0, "signal": None}))
        _find("true", _environment({}, accounts.look_up(workspace.user), workspace)["PATH"])


def _start(request: StartRequest, descriptors: list[int], workspace: WorkspaceSettings, accounts: Accounts) -> int:
    identity = accounts.look_up(request.user or workspace.user)
    terminal = None
    if request.tty:
        terminal = os.ttyname(descriptors[0])
        os.fchown(descriptors[0], identity.uid, -1)
    become(identity)
    folder = workspace.locate(request.cwd or ".")
    try:
        os.chdir(folder)
    except OSError as error:
        shown = request.cwd or workspace.working_dir
        raise Refused(error.errno or errno.ENOENT, shown, f"working folder {shown!r}: {error.strerror}") from None
    environment = _environment(request.env, identity, workspace)
    if isinstance(request.argv, str):
        argv = [next((shell for shell in _SHELLS if os.access(shell, os.X_OK)), _SHELLS[-1]), "-c", request.argv]
    else:
        argv = list(request.argv)
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]]
    if terminal:
        # The first terminal that a session leader opens becomes its controlling terminal.
        actions = [(os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    else:
        actions = [(os.POSIX_SPAWN_DUP2, descriptor, target) for target, descriptor in enumerate(descriptors)]
    program = _find(argv[0], environment["PATH"])
    try:
        pid = os.posix_spawn(
            program, argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESTORED_SIGNALS
        )
    except OSError as error:
        raise _not_executable(error, request.argv) from None
    with contextlib.suppress(OSError):  # a tool has raised this process's nice value
        os.setpriority(os.PRIO_PGRP, pid, workspace.nice)
    return pid


def _not_executable(error: OSError, argv: Sequence[str] | str) -> Refused:
    """Return the error for a program that the kernel refused to execute."""
    program = "the shell" if isinstance(argv, str) else repr(argv[0])
    reason = error.strerror
    if error.errno == errno.E2BIG:
        reason = "arguments and environment are too long (Linux allows 128 KiB each, 2 MiB in all); put them in a file"
    elif error.errno == errno.ENOENT:
        reason = "its interpreter (first line, or ELF loader) does not exist here"
    return Refused(
        error.errno or errno.EINVAL, argv if isinstance(argv, str) else argv[0], f"program {program}: {reason}"
    )


def _environment(given: Mapping[str, str], identity: Identity, workspace: WorkspaceSettings) -> dict[str, str]:
    account = {"HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name}
    return {"PATH": DEFAULT_PATH, **workspace.environment, **account, **given}


def _find(program: str, path: str) -> str:
    """Return the file to execute, as execvp would find it."""
    folders = [""] if "/" in program else [folder for folder in path.split(":") if folder]
    for candidate in (os.path.join(folder, program) for folder in folders):
        try:
            if stat.S_ISREG(os.stat(candidate).st_mode) and os.access(candidate, os.X_OK):
                return candidate
        except (OSError, ValueError):
            continue
    if "/" in program and os.path.exists(program):
        raise Refused(
            errno.EACCES,
            program,
            f"program {program!r} is not an executable file; chmod +x it, or name its interpreter",
        )
    looked = "" if "/" in program else f" on PATH ({path})"
    raise Refused(errno.ENOENT, program, f"program {program!r} does not exist{looked}")
