"""Queue of keys. A key is queued at most once, may have a delay, and is processed by one worker at a time."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BACKOFF_SECONDS, BACKOFF_LIMIT_SECONDS = 0.2, 30.0
"""First and longest back-off. An immediate retry would read the same cache. After a person has fixed a permission, the
retry follows within half a minute.
"""


class WorkQueue(Generic[K]):
    """A key that is added while queued stays queued once; a key that is added while processed is queued again
    afterwards.

    Groups of keys take turns, so that one tenant's thousand objects do not delay another's. Times are seconds of `clock`.
    Not thread-safe.
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
        """By group: keys in order of arrival with their times. The group whose turn is next comes first."""
        self._working: dict[K, float] = {}  # when a worker took the key
        self._advanced: dict[K, float] = {}  # when the worker last made progress
        self._again: dict[K, float] = {}
        self._due: dict[K, float] = {}
        self._delayed: list[tuple[float, int, K]] = []  # a heap; entries that differ from `_due` are outdated
        self._order = itertools.count()
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self.on_add: Callable[[], None] = lambda: None
        self.on_retry: Callable[[], None] = lambda: None
        self.on_take: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that a key was queued."""

    def depth(self) -> int:
        """Return the number of due keys that wait for a worker."""
        return sum(map(len, self._ready.values()))

    def unfinished(self) -> list[float]:
        """Return, for each key in process, the seconds since a worker took it."""
        now = self._clock()
        return [now - since for since in self._working.values()]

    def advance(self, key: K) -> None:
        """Record progress on a key."""
        if key in self._advanced:
            self._advanced[key] = self._clock()

    def stalled(self) -> float:
        """Return the longest time without progress on a key; 0 if none is in process."""
        now = self._clock()
        return now - min(self._advanced.values(), default=now)

    def add(self, key: K) -> None:
        """Queue the key without delay."""
        target = self._again if key in self._working else self._ready.setdefault(self._group_of(key), {})
        if key not in target:
            target[key] = self._clock()
            self.on_add()
            self._changed.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Queue the key with a delay; the shortest of several delays applies."""
        due = self._clock() + max(0.0, seconds)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._delayed, (due, next(self._order), key))
            self._changed.set()

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Queue a failed key after its back-off, which doubles with each failure. Returns the back-off."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # Without jitter, all keys that failed in one outage would be retried at the same time.
        pause = min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2.0 ** min(failures, 16)) * (0.5 + self._jitter() / 2)
        self.on_retry()
        self.add_after(key, max(pause, at_least))
        return max(pause, at_least)

    def forgive(self, key: K) -> None:
        """Reset the key's back-off after a success."""
        self._failures.pop(key, None)

    def take_ready(self) -> K | None:
        """Take the oldest due key of the group whose turn it is, if any. `done` must follow.

        Its delay is cleared: its next work sets a new one.
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
        self._working[key] = self._advanced[key] = now
        return key

    def done(self, key: K) -> None:
        """Finish processing a key."""
        del self._working[key], self._advanced[key]
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
