"""Process trees and their resources, read from /proc.

Processes that end while /proc is read are left out. `proc` is an open descriptor of a /proc folder, so that the
executor can read the process list of a workspace through a descriptor from before any tool ran.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# /proc/PID/stat and statm are a line of some 300 bytes, smaps_rollup has less than 1,000.
_READ_BYTES = 4096
# Limit of the wait for SIGSTOP, which takes effect immediately or after a running exec.
_HOLD_SECONDS = 5.0
_PAUSE_SECONDS = 0.0005
# States of threads that do not run before they are continued, or that have ended.
_STOPPED = "tTZX"


class Process(NamedTuple):
    """Fields of /proc/PID/stat of a process or thread; `state` is a letter as in proc(5), `group` the process group."""

    pid: int
    parent: int
    state: str
    nice: int = 0
    threads: int = 1
    group: int = 0

    @property
    def is_live(self) -> bool:
        """Whether a thread of it still runs. It is a zombie also if only its main thread has ended."""
        return self.state not in "ZX" or self.threads > 1


def parse_stat(text: bytes) -> Process:
    """Parse a /proc/PID/stat line. The command's name in it may contain anything, such as `) R 1`."""
    head, _, tail = text.rpartition(b")")
    fields = tail.split(None, 18)
    numbers = [int(field) for field in (fields[1], fields[16], fields[17], fields[2])]
    return Process(int(head.split(b"(", 1)[0]), numbers[0], fields[0].decode("ascii"), *numbers[1:])


def read_entry(folder: int, name: str) -> bytes:
    """Return the contents of a file in /proc. Raises OSError."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, _READ_BYTES)
    finally:
        os.close(descriptor)


def all_processes(proc: int) -> list[Process]:
    """Return every process of the PID namespace of that /proc that has not ended."""
    return [process for process in _with_zombies(proc) if process.is_live]


def _with_zombies(proc: int) -> list[Process]:
    found = []
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(parse_stat(read_entry(proc, f"{name}/stat")))
    return found


def _threads(proc: int, process: Process) -> list[Process]:
    """Return the threads of a process; `pid` is the thread's id."""
    if process.threads == 1:
        return [process]
    try:
        folder = os.open(f"{process.pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return []
    try:
        return all_processes(folder)
    finally:
        os.close(folder)


def runnable_threads(proc: int, processes: Iterable[Process]) -> list[Process]:
    """Return the threads of these processes that run or wait for a processor; `pid` is the thread's id."""
    return [thread for process in processes for thread in _threads(proc, process) if thread.state == "R"]


def has_stopped(proc: int, process: Process) -> bool:
    """Whether a signal or a debugger has stopped all threads of a process, or they have ended."""
    return process.state in _STOPPED and all(thread.state in _STOPPED for thread in _threads(proc, process))


def live_threads(proc: int, processes: Sequence[Process]) -> list[Process]:
    """Return one thread of each process, the main one unless it has ended, because /proc then reports no memory and no
    files for it.
    """
    ended = {process.pid: _threads(proc, process) for process in processes if process.state in "ZX"}
    return [next((one for one in ended.get(own.pid, ()) if one.state not in "ZX"), own) for own in processes]


def descendants(processes: Iterable[Process], ancestor: int) -> list[Process]:
    """Return the processes below `ancestor`, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = [ancestor]
    while level:
        below = [child for pid in level for child in children.pop(pid, ())]
        found.extend(below)
        level = [process.pid for process in below]
    return found


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def hold(proc: int, pid: int) -> None:
    """Stop a process; return when it has stopped or ended. SIGCONT continues it."""
    deadline = time.monotonic() + _HOLD_SECONDS
    with contextlib.suppress(OSError, ValueError, IndexError):
        while parse_stat(read_entry(proc, f"{pid}/stat")).state not in "TZX" and time.monotonic() < deadline:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_PAUSE_SECONDS)


def kill_below(proc: int, ancestor: int, spared: frozenset[int] = frozenset(), seconds: float = 10.0) -> bool:
    """Kill all descendants of `ancestor` except itself, and `spared` with their descendants; False if some still live after
    `seconds`.

    A process that forks and exits without pause is never alive when it is looked at. The zombies that it leaves show it, so
    this thread reaps none meanwhile, and a signal to its process group ends it.

    Usually processes are killed without being stopped first: if the killer is killed, stopped processes would remain
    forever. If new ones were forked since the previous round, as by a fork bomb, all are stopped first, so that none
    can fork. The ancestor, or a process between, must reap them. Dead processes do not count. Orphans stay below the
    ancestor only if it is a subreaper.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        return _kill_below(proc, ancestor, spared, time.monotonic() + seconds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _kill_below(proc: int, ancestor: int, spared: frozenset[int], deadline: float) -> bool:
    killed: set[int] = set()
    known: set[int] = set()
    while True:
        found, ended, groups = _below(proc, ancestor, spared)
        if not found and known.issuperset(ended):
            return True
        if killed and not killed.issuperset(found):
            for pid in found:
                send(pid, signal.SIGSTOP)
            found, ended, groups = _below(proc, ancestor, spared)
        for pid in found:
            send(pid, signal.SIGKILL)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        killed.update(found)
        known.update(ended)
        if time.monotonic() > deadline:
            return False
        # Killed processes need processor time to end. Waiting gives a fork bomb no advantage.
        time.sleep(_PAUSE_SECONDS)


def _below(proc: int, ancestor: int, spared: frozenset[int]) -> tuple[list[int], list[int], set[int]]:
    """Return the live processes below `ancestor`, the zombies there, and the process groups in which no others are."""
    everything = _with_zombies(proc)
    below = descendants((process for process in everything if process.pid not in spared), ancestor)
    pids = {process.pid for process in below}
    others = {process.group for process in everything if process.pid not in pids}
    live, ended = ([process.pid for process in below if process.is_live is is_live] for is_live in (True, False))
    return live, ended, {process.group for process in below} - others - {0}
