"""Rate limits for creates and deletes. They are separate, so that creates into a full cluster never delay deletes."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

LONGEST_WAIT_SECONDS = 60.0
"""Longest time after which a waiting key is tried again. Groups may leave the queue, so its turn can come earlier than
computed.
"""


class TokenBucket:
    """A token bucket with a steady rate and room for one second's tokens. Future tokens can be reserved."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._tokens = self._most = max(1.0, per_second)
        self._at = 0.0

    def reserve(self, now: float) -> float:
        """Reserve the next token. Returns the time from which it may be used: `now`, or later."""
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
        self._tokens -= 1
        return now if self._tokens >= 0 else now - self._tokens / self._per_second

    def try_take(self, now: float) -> bool:
        """Take a token if one is available. Returns whether it was."""
        if self.reserve(now) <= now:
            return True
        self._tokens += 1
        return False


@dataclass
class _Queue(Generic[K]):
    """The keys of one group in order of arrival, each with its number."""

    keys: dict[K, int] = field(default_factory=dict)
    arrivals: int = 0

    def join(self, key: K) -> None:
        """Append a key unless it is already queued."""
        if key not in self.keys:
            self.keys[key] = self.arrivals
            self.arrivals += 1


class Budget(Generic[K]):
    """Rate and concurrency limit of one kind of write. Groups of keys take turns, so that one write does not wait for
    another tenant's ten thousand.
    """

    def __init__(self, per_second: float, in_flight: int, group_of: Callable[[K], Hashable] = lambda key: None) -> None:
        self._bucket = TokenBucket(per_second)
        self._turn_seconds = 1 / per_second
        self._group_of = group_of
        self._waiting: dict[Hashable, _Queue[K]] = {}
        """Queues by group. The group whose turn is next comes first."""
        self._admitted: set[K] = set()
        self.in_flight = asyncio.Semaphore(in_flight)

    def admit(self, key: K, now: float) -> float:
        """Return 0 if the key may write now, else the seconds after which to call again."""
        group = self._group_of(key)
        if key not in self._admitted:
            self._waiting.setdefault(group, _Queue()).join(key)
        self._serve(now)
        if key in self._admitted:
            self._admitted.remove(key)
            return 0.0
        places = self._waiting[group].keys
        turns = (places[key] - places[next(iter(places))] + 1) * len(self._waiting)
        return min(LONGEST_WAIT_SECONDS, turns * self._turn_seconds)

    def try_extra(self, now: float) -> bool:
        """Take the token for one more write if no key waits for it. Returns whether it was available."""
        self._serve(now)
        return self._bucket.try_take(now)

    def forget(self, key: K) -> None:
        """Remove a key that no longer needs to write."""
        self._admitted.discard(key)
        group = self._group_of(key)
        if (line := self._waiting.get(group)) and line.keys.pop(key, None) is not None and not line.keys:
            del self._waiting[group]

    def _serve(self, now: float) -> None:
        while self._waiting and self._bucket.try_take(now):
            group = next(iter(self._waiting))
            line = self._waiting.pop(group)
            key = next(iter(line.keys))
            del line.keys[key]
            self._admitted.add(key)
            if line.keys:
                self._waiting[group] = line
