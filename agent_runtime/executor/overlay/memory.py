"""Decide which workspaces pause, and which one ends as the last resort, when a sandbox's memory is overcommitted.

`decide` is pure. docs/memory.md gives the reasons for its rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Above this share of the sandbox's limit a workspace ends, so that the use between two measurements does not reach the
# limit.
_LAST_MARK = 0.9
# Above this one ends even if memory does not grow. Smaller growth than the other share is noise.
_HARD_MARK = 0.97
_NOISE = 0.005
# Shares that are kept free so that the oldest workspace can grow to its own limit. The least one allows for the growth
# until a pause takes effect.
_LEAST_RESERVE = 0.1
_MOST_RESERVE = 0.25
# Paused workspaces resume this much below the mark at which others pause.
_HYSTERESIS = 0.1
# Room for each one that resumes, as long as it is not known how it grows.
_RESUMED = 0.025
# The use may grow for this many more measurements until a pause takes effect.
_GROWTH_AHEAD = 2
# New memory that a processor can use in a second, measured; and the share of the limit that is allowed for it at most,
# because a small sandbox would pause all the time otherwise.
_BYTES_A_SECOND = 1 << 30
_MOST_POSSIBLE = 0.1
# Pausing a workspace with less than this share of the mean, and of the limit, would only delay short commands.
_SMALL_OF_MEAN = 0.25
_SMALL_OF_LIMIT = 0.01
# Whenever there was no progress for this long, one more workspace resumes, so that none is paused forever.
_STUCK_SECONDS = 10.0
# Smaller changes do not show that memory was freed.
_FALL = 0.02
# Share of the last 10 s in which all tasks of the node waited for memory (`full avg10` of /proc/pressure/memory).
_MOST_PRESSURE = 20.0


class Unit(NamedTuple):
    """A workspace with the ones that joined it, while it has processes, commands that wait for their start, or files in
    memory.

    `started` says when its oldest command started, on any clock: infinite without one, or if they run without a deadline,
    as servers do. `created` says when the workspace was; no command can change it. `limit` is its own limit of memory.
    """

    name: str
    memory_bytes: int
    started: float
    created: float = 0.0
    limit: int | None = None
    is_paused: bool = False
    is_steady: bool = False
    """Whether it never pauses."""
    is_idle: bool = False
    """Whether it has no processes and no waiting commands, but files in memory (`/dev/shm`)."""
    unknown_bytes: int = 0
    """Its share of memory that only the sandbox's use shows. It may be another one's, so it never counts as its fault."""

    @property
    def held_bytes(self) -> int:
        return self.memory_bytes + self.unknown_bytes


class Situation(NamedTuple):
    """The sandbox's use of memory, by all of its workspaces. `growth` is since the last measurement, `possible` what
    programs can use until the next one (`possible_growth`), `stuck_seconds` that of ProgressClock. `is_settled`: nothing
    was paused or resumed after the last measurement.
    """

    used: int
    limit: int
    growth: int = 0
    possible: int = 0
    stuck_seconds: float = 0.0
    has_pressure: bool = False
    is_settled: bool = True


@dataclass(frozen=True)
class Decision:
    """Names of units. `starts_wait`: commands of workspaces without processes wait for their start."""

    pause: Sequence[str] = ()
    resume: Sequence[str] = ()
    starts_wait: bool = False
    end: tuple[str, str] | None = None
    """The unit that ends, with the cause."""


class ProgressClock:
    """Time since workspaces that share memory last made progress: memory reached a new low, or there was room for a paused
    one to resume. Memory that only swings is no progress, or one workspace could keep the others paused.
    """

    def __init__(self, now: float) -> None:
        self._lowest, self._since = 0, now

    def seconds(self, used: int, limit: int, now: float, *, starts_wait: bool) -> float:
        """Return the time. `starts_wait` is that of the last decision."""
        if not starts_wait or used < self._lowest - limit * _FALL:
            self._lowest, self._since = used, now
        return now - self._since

    def decided(self, decision: Decision, used: int, now: float) -> None:
        if decision.resume and now - self._since < _STUCK_SECONDS:
            self._lowest, self._since = used, now


def possible_growth(limit: int, processors: int, seconds: float) -> int:
    """Return what programs on these processors can use in the time between two measurements."""
    return int(min(processors * _BYTES_A_SECOND * seconds, _MOST_POSSIBLE * limit))


def last_mark(limit: int) -> float:
    """Return the use above which a workspace ends."""
    return limit * _LAST_MARK


def is_near(used: int, limit: int) -> bool:
    """Whether memory may become short within a few measurements."""
    return used > last_mark(limit) / 2


def decide(every: Sequence[Unit], now: Situation) -> Decision:
    """Decide what happens to the units of a sandbox with a limit."""
    units = [unit for unit in every if not unit.is_idle]
    if not units:
        return Decision()
    mark = last_mark(now.limit)
    largest = max(every, key=lambda unit: unit.memory_bytes)
    if largest.memory_bytes > mark:
        return Decision(end=(largest.name, "Memory"))
    oldest_first = sorted(units, key=lambda unit: (unit.started, unit.name))
    if not _is_overcommitted(every, now.limit):
        return Decision(resume=[unit.name for unit in oldest_first if unit.is_paused])
    needed = now.used + _reserve(oldest_first[0], now.limit)
    expected = needed + _GROWTH_AHEAD * max(now.growth, now.possible)
    is_short = now.has_pressure or expected > mark
    free = 1 + int(now.stuck_seconds / _STUCK_SECONDS)
    running = [*oldest_first[:free], *(unit for unit in oldest_first[free:] if unit.is_steady)]
    others = [unit for unit in oldest_first[free:] if not unit.is_steady]
    resumed = [unit for unit in running if unit.is_paused]
    paused = [unit for unit in others if unit.is_paused]
    small = min(_SMALL_OF_MEAN * mark / len(units), _SMALL_OF_LIMIT * now.limit)
    is_growing = now.growth > _NOISE * now.limit
    candidates = [unit for unit in others if not unit.is_paused and unit.held_bytes >= small]
    chosen: list[Unit] = []
    end = None
    if is_short and candidates:
        candidates.sort(key=lambda unit: (unit.held_bytes, unit.started), reverse=True)
        chosen = candidates if needed + now.possible > mark else candidates[: math.ceil(len(candidates) / 2)]
    elif now.is_settled and (now.used > _HARD_MARK * now.limit or (now.used > mark and is_growing)):
        end = _last_resort(every, mark)
    elif paused and now.is_settled and not is_short and (room := mark - _HYSTERESIS * now.limit - expected) >= 0:
        count = 1 + int(room / (_RESUMED * now.limit))
        resumed += paused[:count]
        paused = paused[count:]
    return Decision(
        [unit.name for unit in chosen],
        [unit.name for unit in resumed],
        starts_wait=is_short or bool(paused or chosen),
        end=end,
    )


def _is_overcommitted(units: Sequence[Unit], limit: int) -> bool:
    """Whether the units may use more together than the sandbox has."""
    most = sum(unit.memory_bytes if unit.is_idle else limit if unit.limit is None else unit.limit for unit in units)
    most += sum(unit.unknown_bytes for unit in units)
    return len(units) > 1 and most > limit


def _reserve(oldest: Unit, limit: int) -> float:
    """Return what the oldest unit may still need: it always runs, so that it can end and free its memory."""
    left = math.inf if oldest.limit is None else oldest.limit - oldest.memory_bytes
    return min(max(left, _LEAST_RESERVE * limit), _MOST_RESERVE * limit)


def _last_resort(units: Sequence[Unit], mark: float) -> tuple[str, str] | None:
    """Return the unit to end, with the cause. Of units with more than the mean, the youngest loses least work. It is the
    workspace's age that decides: a policy could make the ages of commands what it likes, and end itself to be tried again.
    """
    large = [unit for unit in units if unit.held_bytes > mark / len(units)]
    if not large:
        return None  # many small ones fill it
    largest = max(large, key=lambda unit: unit.memory_bytes)
    if largest.limit is None and largest.memory_bytes > mark / len(units):
        return largest.name, "Memory"
    others = [unit for unit in large if unit.limit is not None or unit.unknown_bytes]
    return max(others, key=lambda unit: unit.created).name, "SandboxMemory"


def node_has_pressure(text: str | None) -> bool:
    """Whether this content of /proc/pressure/memory shows a node without enough memory; None: it is unknown."""
    for line in (text or "").splitlines():
        kind, _, fields = line.partition(" ")
        if kind == "full":
            for field in fields.split():
                name, _, value = field.partition("=")
                if name == "avg10":
                    return float(value) >= _MOST_PRESSURE
    return False


def read_pressure() -> str | None:
    """Return the content of /proc/pressure/memory, which shows the whole node; None if it cannot be read."""
    try:
        with open("/proc/pressure/memory", encoding="ascii") as file:
            return file.read()
    except OSError:
        return None
