"""Measures whether the memory of a pod's processes grows while none of them is killed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, mean

from tests.support.cluster import Cluster, Object
from tests.support.runner_pods import resident_mebibytes


@dataclass
class MemoryWatch:
    """Reads the memory of pods repeatedly."""

    cluster: Cluster
    seen: dict[str, "Samples"] = field(default_factory=dict)
    """Samples by the name of the pod."""

    def look(self, pods: Sequence[Object]) -> None:
        """Read each of these pods once."""
        for pod in pods:
            if found := resident_mebibytes(self.cluster, pod):
                self.seen.setdefault(pod["metadata"]["name"], Samples()).add(time.monotonic(), found)


@dataclass
class Samples:
    """Samples of one pod: times in seconds of one clock, memory in MiB."""

    times: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    processes: set[frozenset[int]] = field(default_factory=set)
    """All observed sets of process ids. With more than one, a process was replaced."""

    def add(self, now: float, found: dict[int, float]) -> None:
        """Add one reading: memory by process id."""
        self.times.append(now)
        self.sizes.append(sum(found.values()))
        self.processes.add(frozenset(found))

    @property
    def growth(self) -> float:
        """Return the growth of the memory from the first to the last reading, by the line of least squares, relative to
        its mean.
        """
        line = linear_regression(self.times, self.sizes)
        return line.slope * (self.times[-1] - self.times[0]) / mean(self.sizes)

    def __str__(self) -> str:
        sizes = " ".join(f"{size:.1f}" for size in self.sizes)
        return f"{sizes} MiB in {self.times[-1] - self.times[0]:.0f} s, {self.growth:+.1%}"
