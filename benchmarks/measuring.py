"""Measures time and memory of the current process: the same code measures us and, in their own interpreters, the peers.

Standard library only, because peers do not have our packages.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MEMORY = "/dev/shm"
DISK = Path(__file__).resolve().parent.parent / "build"
RESET_PEAK = "5"  # proc(5): written to clear_refs, it resets the peak of the resident memory to the current value


@dataclass(frozen=True)
class Cost:
    """Wall and processor seconds of this process (all threads, no children), and its resident bytes at the start and at
    their peak.
    """

    wall_seconds: float
    cpu_seconds: float
    start_bytes: int
    peak_bytes: int


class Meter:
    """Measures the time since its creation; `read` may be called repeatedly."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self._start_bytes = memory("VmRSS")
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def read(self) -> Cost:
        wall = time.perf_counter() - self._wall
        return Cost(wall, time.process_time() - self._cpu, self._start_bytes, memory("VmHWM"))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far: user and system time of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(field: str, pid: int | str = "self") -> int:
    """Return a process's resident bytes (field VmRSS) or their maximum so far (field VmHWM)."""
    status = Path(f"/proc/{pid}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{status} has no {field}; these benchmarks need Linux")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a temporary folder in memory.

    It is not on a disk, because ext4, for every file that it creates, searches all files that were deleted there in the
    last five minutes. A run would then depend on the files that the previous run deleted (measured: 5 times the
    processor time of a write).
    """
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-", dir=MEMORY) as folder:
        yield Path(folder)


@contextmanager
def disk_folder() -> Iterator[Path]:
    """Yield a temporary folder on the disk of the checkout, removed at the end.

    Only for benchmarks whose files are spread over the disk (recording/local_files.py); others use `memory_folder`.
    """
    DISK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=DISK) as folder:
        yield Path(folder)


def file_system(folder: Path) -> str:
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():  # proc(5)
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kind.split()[0]
    return "a file system that is not listed"


def pin_to_core(number: int) -> None:
    """Pin this process and its future threads to one core, counted among those that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is at least this fraction of all values. Raises ValueError without values."""
    if not values:
        raise ValueError("no values were measured")
    ordered = sorted(values)
    return ordered[max(0, -int(-fraction * len(ordered) // 1) - 1)]
