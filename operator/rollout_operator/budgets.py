"""How fast the operator creates and deletes. Two budgets, so that creates into a full cluster never hold up deletes."""

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


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


class Budget(Generic[K]):
    """One kind of write: so many a second, so many at once."""

    def __init__(self, per_second: float, in_flight: int) -> None:
        self._bucket = TokenBucket(per_second)
        self._promised: dict[K, float] = {}
        self.in_flight = asyncio.Semaphore(in_flight)

    def admit(self, key: K, now: float) -> float:
        """Seconds until the key may write; 0: now. A key that comes back keeps its place, so it need not wait here: what
        others have to do goes on."""
        due = self._promised.pop(key, None)
        if due is None:
            due = self._bucket.promise(now)
        if due <= now:
            return 0.0
        self._promised[key] = due
        return due - now

    def spare(self, now: float) -> bool:
        """Take a further write if there is one that nobody waits for."""
        return self._bucket.spare(now)

    def forget(self, key: K) -> None:
        """The key does not want to write any more."""
        self._promised.pop(key, None)
