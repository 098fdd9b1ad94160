"""The resources that a workspace uses, and whether they exceed its limits. Measuring uses descriptors that the executor
got before any tool ran.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from agent_runtime.executor.host import Limits
from agent_runtime.executor.init.processes import Process, read_entry

_PAGE = os.sysconf("SC_PAGE_SIZE")
# The executor acts at this share, so that the use between two measurements does not reach the sandbox's own limit.
_SANDBOX_FRACTION = 0.9
# Threads per processor at which tools keep their priority: enough for `make -j`.
_THREADS_A_PROCESSOR = 2
# sched(7): each step of nice gives a thread 1.25 times less of a busy processor; there are 19 steps.
_NICE_RATIO = 1.25
MAX_NICE = 19
# The limit if none is given: enough for any build, and far below the 32,768 process ids that a machine may have.
MAX_PROCESSES = 8192
# Checking this many takes about a second, during which the executor is blocked.
MAX_DESCRIPTORS = 131_072


@dataclass(frozen=True)
class Usage:
    """Bytes of memory, live processes and threads, bytes of disk and open descriptors of one workspace."""

    memory_bytes: int = 0
    processes: int = 0
    disk_bytes: int = 0
    descriptors: int = 0


def total(usages: Iterable[Usage]) -> Usage:
    """Return the sum of what several workspaces use."""
    columns = zip(*(dataclasses.astuple(usage) for usage in usages), strict=True)
    return Usage(*(sum(column) for column in columns))


def is_largest(usage: Usage, others: Iterable[Usage], cause: str) -> bool:
    """Whether none of the others that have processes uses more of the resource that `cause` names."""

    def amount(one: Usage) -> int:
        return {"Memory": one.memory_bytes, "Disk": one.disk_bytes}.get(cause, one.processes)

    return all(amount(usage) >= amount(other) for other in others if other.processes)


def excess(usage: Usage, limits: Limits, free: float) -> str | None:
    """Return the limit that a workspace exceeds, as a cause (`Memory`, `Disk`, `Processes`). `free`: bytes of the disk."""
    if limits.memory_bytes is not None and usage.memory_bytes > limits.memory_bytes:
        return "Memory"
    if usage.processes > (limits.processes or MAX_PROCESSES) or usage.descriptors > MAX_DESCRIPTORS:
        return "Processes"
    most = disk_limit(limits, free)
    return "Disk" if most is not None and usage.disk_bytes > most else None


def disk_limit(limits: Limits, free: float) -> float | None:
    """Return the most bytes of disk that a workspace may use while `free` others are left; None: any number."""
    most = math.inf if limits.disk_bytes is None else limits.disk_bytes
    most = min(most, free) if limits.leaves_free else most
    return None if most == math.inf else most


def fair_nice(runnable: int, processors: int, ordinary: int = 0) -> int:
    """Return the lowest nice value with which this many threads weigh no more than two `ordinary` ones on each
    processor.
    """
    excess = max(1.0, runnable / (_THREADS_A_PROCESSOR * processors))
    return min(MAX_NICE, ordinary + math.ceil(math.log(excess, _NICE_RATIO)))


def sandbox_disk_excess(
    usages: Mapping[str, Usage], active: Iterable[str], disk_bytes: int | None, leaders: Mapping[str, str] | None = None
) -> str | None:
    """Return the active workspace that uses most disk, if all together come near the sandbox's limit; else None.

    Workspaces with the same leader count together, so that a task with services does not look small. Of these, the
    largest one is returned.
    """
    candidates = [name for name in active if name in usages]
    leaders = leaders or {}
    used = sum(usage.disk_bytes for usage in usages.values())
    if not candidates or disk_bytes is None or used <= disk_bytes * _SANDBOX_FRACTION:
        return None
    sums = Counter[str]()
    for name, usage in usages.items():
        sums[leaders.get(name, name)] += usage.disk_bytes
    return max(candidates, key=lambda name: (sums[leaders.get(name, name)], usages[name].disk_bytes))


def shm_bytes(shm: int) -> int:
    """Return the bytes of the files on that tmpfs."""
    info = os.fstatvfs(shm)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def resident_bytes(proc: int, pid: int) -> int:
    """Return the memory that a process has mapped and touched, libraries included; 0 if it has ended."""
    try:
        return int(read_entry(proc, f"{pid}/statm").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def most_memory_bytes(proc: int, processes: Iterable[Process], init: int, init_bytes: int) -> int:
    """Return an upper bound of the memory of these processes. Libraries and forked pages count once for each process, but
    the initial memory of `init`, `init_bytes`, which its children share, counts once.
    """
    resident = 0
    for process in processes:
        own = resident_bytes(proc, process.pid)
        resident += max(0, own - init_bytes) if process.parent == init else own
    return resident


def exact_memory_bytes(proc: int, processes: Iterable[Process], shared: int) -> int:
    """Return the memory of these processes, with `shared` bytes of files in memory. This waits for a lock that a process
    may hold for minutes, so it must not be called in the event loop.
    """
    anonymous = mapped = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            for line in read_entry(proc, f"{process.pid}/smaps_rollup").split(b"\n"):
                if line.startswith(b"Pss_Anon:"):
                    anonymous += int(line.split()[1]) * 1024
                elif line.startswith(b"Pss_Shmem:"):
                    mapped += int(line.split()[1]) * 1024
    return anonymous + max(mapped, shared)


class Hidden(NamedTuple):
    """What open files without a name hold: memfds, and deleted files; the number of open descriptors; and those files, by
    device and inode.
    """

    memory_bytes: int
    disk_bytes: int
    descriptors: int
    files: Set[tuple[int, int]]


def hidden_bytes(proc: int, processes: Iterable[Process], memory_device: int) -> Hidden:
    """Measure what these processes have open. It stops at more than MAX_DESCRIPTORS."""
    memory = disk = descriptors = 0
    seen: set[tuple[int, int]] = set()
    for process in processes:
        if descriptors > MAX_DESCRIPTORS:
            break
        with contextlib.suppress(OSError):
            folder = os.open(f"{process.pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
            try:
                names = os.listdir(folder)
                descriptors += len(names)
                for name in names:
                    with contextlib.suppress(OSError):
                        info = os.stat(name, dir_fd=folder)
                        if info.st_nlink or not stat.S_ISREG(info.st_mode) or (info.st_dev, info.st_ino) in seen:
                            continue
                        seen.add((info.st_dev, info.st_ino))
                        if info.st_dev == memory_device:
                            memory += info.st_blocks * 512
                        else:
                            disk += info.st_blocks * 512
            finally:
                os.close(folder)
    return Hidden(memory, disk, descriptors, seen)


def shared_mappings(
    proc: int, processes: Iterable[Process], memory_device: int, before: Mapping[int, int]
) -> Mapping[int, int] | None:
    """Return the bytes, by inode, of memory that processes share by a mapping: anonymous, of System V, or of a closed memfd.
    Pages count that no process has mapped any more: `madvise(MADV_DONTNEED)` removes them from all other figures, but
    does not free them.

    None if there are some, and this process may not measure them (it needs CAP_SYS_ADMIN in the first user namespace).
    It may wait for a lock as long as `exact_memory_bytes`.
    `before` is the last answer: a mapping that moves while it is measured keeps its bytes.
    """
    found: dict[int, int] = {}
    device = f" {os.major(memory_device):02x}:{os.minor(memory_device):02x} ".encode()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in read_entry(proc, f"{process.pid}/maps").split(b"\n"):
                if device not in line:
                    continue
                fields = line.split(None, 5)
                inode = int(fields[4])
                begin, _, end = fields[0].decode().partition("-")
                entry = f"{process.pid}/map_files/{int(begin, 16):x}-{int(end, 16):x}"
                try:
                    found[inode] = os.stat(entry, dir_fd=proc).st_blocks * 512
                except PermissionError:
                    return None
                except OSError:
                    found.setdefault(inode, before.get(inode, 0))
    return found


class OwnGroup:
    """The container's control group, if it has a memory limit."""

    def __init__(self, memory_bytes: int, folder: str = "/sys/fs/cgroup") -> None:
        self._stat: str | None = None
        self._own = 0
        for limit_name, stat_name in (
            ("memory.max", "memory.stat"),
            ("memory/memory.limit_in_bytes", "memory/memory.stat"),
        ):
            with contextlib.suppress(OSError, ValueError):
                with open(f"{folder}/{limit_name}", encoding="ascii") as file:
                    limit = int(file.read())  # `max` is no number
                if memory_bytes <= limit < os.sysconf("SC_PHYS_PAGES") * _PAGE:
                    self._stat = f"{folder}/{stat_name}"
                    self._own = limit - memory_bytes
                    return

    def used(self) -> tuple[int, int]:
        """Return the memory that all workspaces use, without what the container has for the executor itself; and how much
        of it can be shared memory or the kernel's, of which the executor has little. (0, 0) if it is unknown.
        """
        if self._stat is None:
            return 0, 0
        try:
            stat = _numbers(self._stat)
            # Version 1 of control groups calls anonymous memory rss, and does not tell the kernel's that is in use.
            private, shared = stat["anon"] if "anon" in stat else stat["rss"], stat["shmem"]
            kernel = max(0, stat.get("kernel", 0) - stat.get("slab_reclaimable", 0)) + stat.get("sock", 0)
            return max(0, private + shared + kernel - self._own), shared + kernel
        except (OSError, ValueError, KeyError):
            return 0, 0


class KernelKills:
    """Notices when the kernel ends a process of this process's control group for lack of memory: in this group, in one above
    it, or on the machine. `listed` is the content of /proc/self/cgroup.
    """

    def __init__(self, folder: str = "/sys/fs/cgroup", listed: str | None = None) -> None:
        lines = [line.split(":", 2) for line in (_own_groups() if listed is None else listed).splitlines()]
        own = {kinds: path for _, kinds, path in (line for line in lines if len(line) == 3)}
        unified, first = own.get("", ""), own.get("memory", "")
        self._events = ""
        # In a container its own group may be mounted in the place of the first one.
        for events in (
            *(f"{folder}{path}/memory.events" for path in (unified, "")),
            *(f"{folder}/memory{path}/memory.oom_control" for path in (first, "")),
        ):
            with contextlib.suppress(OSError, ValueError):
                if "oom_kill" in _numbers(events):
                    self._events = events
                    break
        self._count = self._kills()

    def look(self) -> bool:
        """Return whether the kernel has ended a process since the last call."""
        before, self._count = self._count, self._kills()
        return self._count > before

    def _kills(self) -> int:
        try:
            return _numbers(self._events).get("oom_kill", 0)
        except (OSError, ValueError):
            return 0


def _own_groups() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        return file.read()
    return ""


def _numbers(path: str) -> dict[str, int]:
    with open(path, encoding="ascii") as file:
        return {name: int(value) for name, value in (line.split() for line in file)}


def shared_memory_of_machine() -> int:
    """Return the bytes of files in memory and of shared mappings of the machine; 0 if they are unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("Shmem:"):
                return int(line.split()[1]) * 1024
    return 0
