"""Keys that wait to be worked on: each once, after its delay, by one worker at a time; failed ones after a growing pause."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BACKOFF_SECONDS, BACKOFF_LIMIT_SECONDS = 0.2, 30.0
"""A first retry at once would only meet the same cache; half a minute is what a person waits for a fixed permission."""


class WorkQueue(Generic[K]):
    """A key that is added while it waits is there once; added while it is worked on, it comes back afterwards.

    Groups of keys take turns, so that one tenant's thousand objects do not hold up another's.
    Times are seconds of `clock`. Not thread-safe: one event loop.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        group_of: Callable[[K], Hashable] = lambda key: None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._group_of = group_of
        self._jitter = jitter
        self._ready: dict[Hashable, dict[K, float]] = {}
        """By group: keys in order of arrival, and when each was added. The group whose turn is next comes first."""
        self._working: dict[K, float] = {}  # -> since when
        self._advanced: dict[K, float] = {}  # -> when its work last got further
        self._again: dict[K, float] = {}
        self._due: dict[K, float] = {}
        self._delayed: list[tuple[float, int, K]] = []  # a heap; entries that `_due` disowns are skipped
        self._order = itertools.count()
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self.on_add: Callable[[], None] = lambda: None
        self.on_retry: Callable[[], None] = lambda: None
        self.on_take: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that a key has waited."""

    def depth(self) -> int:
        """Keys that are due and wait for a worker."""
        return sum(map(len, self._ready.values()))

    def unfinished(self) -> list[float]:
        """For each key that is worked on, the seconds since its worker took it."""
        now = self._clock()
        return [now - since for since in self._working.values()]

    def advance(self, key: K) -> None:
        """The work on a key has got further."""
        if key in self._working:
            self._advanced[key] = self._clock()

    def stalled(self) -> float:
        """The longest time for which the work on a key has not got further; 0 when none is worked on."""
        now = self._clock()
        return max(
            (now - max(since, self._advanced.get(key, since)) for key, since in self._working.items()), default=0.0
        )

    def add(self, key: K) -> None:
        """Have the key worked on as soon as possible."""
        target = self._again if key in self._working else self._ready.setdefault(self._group_of(key), {})
        if key not in target:
            target[key] = self._clock()
            self.on_add()
            self._changed.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Have it worked on after some seconds at the latest; of several delays the shortest counts."""
        due = self._clock() + max(0.0, seconds)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._delayed, (due, next(self._order), key))
            self._changed.set()

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Have a key that failed worked on again after its back-off, which doubles with each failure. Returns it."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # Without jitter, all that failed in one outage would come back in one wave.
        pause = min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2.0 ** min(failures, 16)) * (0.5 + self._jitter() / 2)
        self.on_retry()
        self.add_after(key, max(pause, at_least))
        return max(pause, at_least)

    def forgive(self, key: K) -> None:
        """The key went well: its next failure is a first one."""
        self._failures.pop(key, None)

    def take_ready(self) -> K | None:
        """Take the key that has waited longest in the group whose turn it is, if one is due. `done` must follow.

        Its delay is forgotten: its work says anew when to come back.
        """
        now = self._clock()
        while self._delayed and self._delayed[0][0] <= now:
            due, _, key = heapq.heappop(self._delayed)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key)
        if not self._ready:
            return None
        group = next(iter(self._ready))
        line = self._ready.pop(group)
        key = next(iter(line))
        self.on_take(now - line.pop(key))
        if line:
            self._ready[group] = line
        self._due.pop(key, None)
        self._working[key] = now
        return key

    def done(self, key: K) -> None:
        """The work on a key is over."""
        del self._working[key]
        self._advanced.pop(key, None)
        if (added := self._again.pop(key, None)) is not None:
            self._ready.setdefault(self._group_of(key), {})[key] = added
            self._changed.set()

    async def take(self) -> K:
        while True:
            self._changed.clear()
            if (key := self.take_ready()) is not None:
                if self._ready:
                    self._changed.set()  # another worker's turn
                return key
            timeout = self._delayed[0][0] - self._clock() if self._delayed else None
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                continue
