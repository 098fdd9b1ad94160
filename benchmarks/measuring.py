"""A process's cost of its work: the same code for our side and, in a peer's own interpreter, for theirs.

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
RESET_PEAK = "5"  # proc(5): written to clear_refs it sets the peak of the resident memory to what is resident now


@dataclass(frozen=True)
class Cost:
    """Wall and processor seconds of this process (all threads, no children), and its resident bytes before and at most."""

    wall_seconds: float
    cpu_seconds: float
    start_bytes: int
    peak_bytes: int


class Meter:
    """Measures from its creation on; `read` may be called repeatedly."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self._start_bytes = memory("VmRSS")
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def read(self) -> Cost:
        wall = time.perf_counter() - self._wall
        return Cost(wall, time.process_time() - self._cpu, self._start_bytes, memory("VmHWM"))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far, with all its threads and the kernel's share."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(field: str, pid: int | str = "self") -> int:
    """Return bytes of a process: VmRSS, the resident ones, or VmHWM, their maximum."""
    status = Path(f"/proc/{pid}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{status} has no {field}; these benchmarks need Linux")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a temporary folder in memory.

    Not on a disk: for every file that ext4 creates, it looks through all that were deleted there in the last five
    minutes, so that a run would measure the deletion of the previous run (measured: 5 times the processor time of a
    write).
    """
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-", dir=MEMORY) as folder:
        yield Path(folder)


@contextmanager
def disk_folder() -> Iterator[Path]:
    """Yield a temporary folder on the disk of the checkout, removed at the end.

    Only for benchmarks that spread their folders over the disk (recording/local_files.py): otherwise see
    `memory_folder`.
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
