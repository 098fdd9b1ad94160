"""How much of its time an agent has used that runs on by itself. Pure.

Time in which it was kept waiting by what is not its own counts for nobody: a server that failed, a shut gate, a slow store.
Its calls may run side by side, so what several of them lost at once is lost once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Span = tuple[float, float]
"""Beginning and end, by one clock."""


@dataclass
class AgentClock:
    """All times are of the event loop; `used_before` was counted by the runners before this one."""

    started: float
    used_before: float = 0.0
    _lost: list[Span] = field(default_factory=list)
    """Apart from each other, in order."""
    _waits: dict[object, float] = field(default_factory=dict)
    """What keeps the agent waiting now, and since when."""

    def used(self, now: float) -> float:
        """Seconds that count."""
        waiting = [(since, now) for since in self._waits.values()]
        lost = sum(end - begin for begin, end in union([*self._lost, *waiting]))
        return self.used_before + (now - self.started) - lost

    def wait(self, reason: object, now: float) -> None:
        """From now on this keeps the agent waiting."""
        self._waits.setdefault(reason, now)

    def go_on(self, reason: object, now: float) -> None:
        """It does so no longer."""
        if (since := self._waits.pop(reason, None)) is not None:
            self.excuse(since, now)

    def excuse(self, begin: float, end: float) -> None:
        """That time was lost, as turns out now."""
        self._lost = union([*self._lost, (begin, end)])


def union(spans: Sequence[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined
