"""Whether the memory of a pod's processes grows, over a time in which none of them is killed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, mean

from tests.support.cluster import Cluster, Object
from tests.support.runner_pods import resident_mebibytes


@dataclass
class MemoryWatch:
    """Looks at pods again and again."""

    cluster: Cluster
    seen: dict[str, "Samples"] = field(default_factory=dict)
    """By name of the pod."""

    def look(self, pods: Sequence[Object]) -> None:
        """Once at each of these pods."""
        for pod in pods:
            if found := resident_mebibytes(self.cluster, pod):
                self.seen.setdefault(pod["metadata"]["name"], Samples()).add(time.monotonic(), found)


@dataclass
class Samples:
    """Of one pod: times in seconds of any one clock, memory in MiB."""

    times: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    processes: set[frozenset[int]] = field(default_factory=set)
    """All sets of process ids that were seen: more than one, and a younger process stands for an older one."""

    def add(self, now: float, found: dict[int, float]) -> None:
        """One look: memory by process id."""
        self.times.append(now)
        self.sizes.append(sum(found.values()))
        self.processes.add(frozenset(found))

    @property
    def growth(self) -> float:
        """By how much of its mean the memory grows from the first look to the last, by the line of least squares."""
        line = linear_regression(self.times, self.sizes)
        return line.slope * (self.times[-1] - self.times[0]) / mean(self.sizes)

    def __str__(self) -> str:
        sizes = " ".join(f"{size:.1f}" for size in self.sizes)
        return f"{sizes} MiB in {self.times[-1] - self.times[0]:.0f} s, {self.growth:+.1%}"
