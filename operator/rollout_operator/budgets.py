"""How fast the operator creates and deletes. Two budgets, so that creates into a full cluster never hold up deletes."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

LONGEST_WAIT_SECONDS = 60.0
"""A key comes back so soon at least: other groups may have stopped to take turns."""


class TokenBucket:
    """Tokens come at a steady rate; one second's worth is kept. Later ones can be promised."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._tokens = self._most = max(1.0, per_second)
        self._at = 0.0

    def promise(self, now: float) -> float:
        """Take the next token. Returns the time from which it may be spent: `now`, or later."""
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
        self._tokens -= 1
        return now if self._tokens >= 0 else now - self._tokens / self._per_second

    def spare(self, now: float) -> bool:
        """Take a token if there is one."""
        if self.promise(now) <= now:
            return True
        self._tokens += 1
        return False


@dataclass
class _Line(Generic[K]):
    """Keys of one group in order of arrival, with the number of each."""

    keys: dict[K, int] = field(default_factory=dict)
    arrivals: int = 0

    def join(self, key: K) -> None:
        """Put a key at the end, unless it is here."""
        if key not in self.keys:
            self.keys[key] = self.arrivals
            self.arrivals += 1


class Budget(Generic[K]):
    """One kind of write: so many a second, so many at once. Groups of keys take turns: who wants one write does not wait for
    another tenant's ten thousand."""

    def __init__(self, per_second: float, in_flight: int, group_of: Callable[[K], Hashable] = lambda key: None) -> None:
        self._bucket = TokenBucket(per_second)
        self._turn_seconds = 1 / per_second
        self._group_of = group_of
        self._waiting: dict[Hashable, _Line[K]] = {}
        """By group; the group whose turn is next comes first."""
        self._admitted: set[K] = set()
        self.in_flight = asyncio.Semaphore(in_flight)

    def admit(self, key: K, now: float) -> float:
        """Seconds after which the key should come back; 0: it may write now. It keeps its place among those of its group, so
        it need not wait here: what others have to do goes on."""
        group = self._group_of(key)
        if key not in self._admitted:
            self._waiting.setdefault(group, _Line()).join(key)
        self._serve(now)
        if key in self._admitted:
            self._admitted.remove(key)
            return 0.0
        places = self._waiting[group].keys
        turns = (places[key] - places[next(iter(places))] + 1) * len(self._waiting)
        return min(LONGEST_WAIT_SECONDS, turns * self._turn_seconds)

    def spare(self, now: float) -> bool:
        """Take a further write if there is one that nobody waits for."""
        self._serve(now)
        return self._bucket.spare(now)

    def forget(self, key: K) -> None:
        """The key does not want to write any more."""
        self._admitted.discard(key)
        group = self._group_of(key)
        if (line := self._waiting.get(group)) and line.keys.pop(key, None) is not None and not line.keys:
            del self._waiting[group]

    def _serve(self, now: float) -> None:
        while self._waiting and self._bucket.spare(now):
            group = next(iter(self._waiting))
            line = self._waiting.pop(group)
            key = next(iter(line.keys))
            del line.keys[key]
            self._admitted.add(key)
            if line.keys:
                self._waiting[group] = line
