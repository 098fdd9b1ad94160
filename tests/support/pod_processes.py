"""Processes of pods that run on this machine, as its kernel sees them."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.cluster import Object

CGROUPS = Path("/sys/fs/cgroup")


def processes(pod: Object) -> Iterator[Path]:
    """Folders below /proc of all processes of a pod's containers, without the one (pause) that holds its network."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if f"/pod{pod['metadata']['uid']}/" in (folder / "cgroup").read_text() and command(folder) != "/pause":
                yield folder


def command(process: Path) -> str:
    """Its command line."""
    return (process / "cmdline").read_text().replace("\0", " ").strip()


def running(wanted: str, pod: Object) -> Sequence[int]:
    """Process ids of a command, by its whole command line, in a pod."""
    found = []
    for process in processes(pod):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if command(process) == wanted:
                found.append(int(process.name))
    return found


def memory_peak(pod: Object) -> tuple[int, int]:
    """The most bytes that a pod's one container had so far, and its limit."""
    groups = [line.split(":", 2) for line in (next(processes(pod)) / "cgroup").read_text().splitlines()]
    for _, controllers, path in groups:
        if controllers == "memory":
            folder = CGROUPS / "memory" / path.lstrip("/")
            return _number(folder / "memory.max_usage_in_bytes"), _number(folder / "memory.limit_in_bytes")
    folder = CGROUPS / groups[0][2].lstrip("/")
    return _number(folder / "memory.peak"), _number(folder / "memory.max")


def _number(file: Path) -> int:
    return int(file.read_text())
