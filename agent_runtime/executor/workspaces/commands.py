"""Starts commands, each under a subreaper of its own. Runs in a process that init has forked for it.

The subreaper is the parent to which everything the command leaves behind falls back, setsid and double forks included, so
"this command's tree" stays well defined, and no other command's server is ever hit. It reports the command's own end
whatever runs on. When the last descendant has gone, it takes the next command: forking another one would cost more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from agent_runtime.executor.workspaces import kernel
from agent_runtime.executor.workspaces.channel import HEADER_BYTES, Channel, Message, close_all, packets
from agent_runtime.executor.workspaces.identity import Accounts, Identity, Refused, become

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a subreaper tells init: its process, and the request that it works for, or that it waits for one.
NOTE = struct.Struct("=II")
WAITING = 2**32 - 1
_PEEKED_BYTES = 65_536
# A small program takes 1 to 2 ms; who waits for the start of a longer one does not notice so little.
_SOON_SECONDS = 0.005
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
# Python ignores these two; a command expects their defaults.
_RESTORED_SIGNALS = {signal.SIGPIPE, signal.SIGXFSZ}


class Surroundings(NamedTuple):
    """What init knows of the workspace it serves."""

    isolated: bool
    root: str = ""
    user: str = "0"
    working_dir: str = "/"
    environment: Mapping[str, str] = {}
    rlimits: Mapping[int, int] = {}
    layer: tuple[tuple[str, int], ...] = ()

    def locate(self, path: str) -> str:
        """Where a workspace path is for this process. Relative ones start at the working folder."""
        return (
            self.root + os.path.normpath("/" + os.path.join(self.working_dir, path))
            if self.root
            else os.path.join(self.working_dir, path)
        )

    def make_working_folder(self) -> None:
        """Make the working folder where there is none, for the default user, who may not be let to make it himself.

        Where that fails, whoever needs it is told so.
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
                identity = Accounts().look_up(self.user)
                os.chown(missing[0], identity.uid, identity.gid)

    def bound(self) -> None:
        """Put the workspace's per-process limits on this process and its children."""
        for which, value in self.rlimits.items():
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


def run(channel: Channel, starts: Channel, notes: int, turn: int, where: Surroundings) -> NoReturn:
    """Start commands one after the other, and report on each to `channel`.

    Requests come from `starts`, which one process reads at a time: who holds the lock on `turn`, which the kernel gives
    back when its holder dies. Init learns through the pipe `notes` who waits and who works for what.
    """
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    where.bound()
    accounts = Accounts()
    _rehearse(accounts, where)
    fcntl.lockf(turn, fcntl.LOCK_EX)
    while True:
        if not _suits(starts, accounts, where):
            os._exit(0)
        received = starts.receive()
        if received is None:
            os._exit(0)
        number, request, descriptors = received
        os.write(notes, NOTE.pack(os.getpid(), number))
        fcntl.lockf(turn, fcntl.LOCK_UN)
        news: Message
        try:
            pid = _start(request, descriptors, where, accounts)
            news = {"pid": pid}
        except Refused as refusal:
            pid = 0
            news = {"errno": refusal.errno, "path": refusal.path, "error": refusal.message}
        close_all(descriptors)
        if not _follow(channel, number, pid, news, lambda: _take_turn(notes, turn)):
            os._exit(0)


def _take_turn(notes: int, turn: int) -> bool:
    """Wait for the next request from now on; False when another one waits already."""
    try:
        fcntl.lockf(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    os.write(notes, NOTE.pack(os.getpid(), WAITING))
    return True


def _follow(channel: Channel, number: int, command: int, news: Message, take_turn: Callable[[], bool]) -> bool:
    """Report the command's start (`news`) and end, and return with `take_turn` when all that it left behind has gone too.

    Most commands end soon and leave nothing behind. Their start and end are one message, sent last: whoever hears of the end
    may start the next command at once, and must find this process waiting, or init would fork another.
    """
    if command:
        signal.sigtimedwait({signal.SIGCHLD}, _SOON_SECONDS)
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG if news else 0)
        except ChildProcessError:
            is_next = take_turn()
            if news:
                channel.send(number, news)
            return is_next
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
            news |= {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        elif not ended:
            channel.send(number, news)
            news = {}


def _suits(starts: Channel, accounts: Accounts, where: Surroundings) -> bool:
    """Wait for a request; whether this process can still become who the command is to run as.

    One that has given up root can start commands of the same user only, and cannot hand a terminal over. It leaves any
    other request where it is, for a fresh process.
    """
    if os.geteuid() == 0:
        return True
    packet = starts.end.recv(_PEEKED_BYTES, socket.MSG_PEEK)
    try:
        request = json.loads(packet[HEADER_BYTES:]) if packet else {}
        identity = accounts.look_up(request.get("user") or where.user)
    except (ValueError, Refused):
        return False
    return not request.get("tty") and (identity.uid, identity.gid, list(identity.groups)) == (
        os.geteuid(),
        os.getegid(),
        [os.getegid(), *sorted(set(os.getgroups()) - {os.getegid()})],
    )


def _rehearse(accounts: Accounts, where: Surroundings) -> None:
    """Do, before there is a request, what it will need: then the memory this touches is this process's own already."""
    with contextlib.suppress(Refused):
        packets(0, {"code": 0, "signal": None})
        _find("true", _environment({}, accounts.look_up(where.user), where)["PATH"])


def _start(request: Message, descriptors: list[int], where: Surroundings, accounts: Accounts) -> int:
    identity = accounts.look_up(request["user"] or where.user)
    terminal = None
    if request["tty"]:
        terminal = os.ttyname(descriptors[0])
        os.fchown(descriptors[0], identity.uid, -1)
    become(identity)
    folder = where.locate(request["cwd"] or ".")
    try:
        os.chdir(folder)
    except OSError as error:
        shown = request["cwd"] or where.working_dir
        raise Refused(error.errno or errno.ENOENT, shown, f"working folder {shown!r}: {error.strerror}") from None
    environment = _environment(request["env"], identity, where)
    argv = request["argv"]
    if isinstance(argv, str):
        argv = [next((shell for shell in _SHELLS if os.access(shell, os.X_OK)), _SHELLS[-1]), "-c", argv]
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]]
    if terminal:
        # The first terminal that a session leader opens becomes the one that controls it.
        actions = [(os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    else:
        actions = [(os.POSIX_SPAWN_DUP2, descriptor, target) for target, descriptor in enumerate(descriptors)]
    program = _find(argv[0], environment["PATH"])
    try:
        return os.posix_spawn(
            program, argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESTORED_SIGNALS
        )
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.E2BIG:
            reason = (
                "arguments and environment are too long (Linux allows 128 KiB each, 2 MiB in all); put them in a file"
            )
        elif error.errno == errno.ENOENT:
            reason = "its interpreter (first line, or ELF loader) does not exist here"
        raise Refused(error.errno or errno.EINVAL, argv[0], f"program {argv[0]!r}: {reason}") from None


def _environment(given: Mapping[str, str], identity: Identity, where: Surroundings) -> dict[str, str]:
    own = {"HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name}
    return {"PATH": DEFAULT_PATH, **where.environment, **own, **given}


def _find(program: str, path: str) -> str:
    """The file to execute, found as execvp would."""
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
