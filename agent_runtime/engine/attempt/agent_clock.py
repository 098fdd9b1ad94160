"""The clock of an agent: how much of its time it has used, over all runners of the attempt.

Time in which it was kept waiting by what is not its own does not count: storage, plugins, an environment, a failing model
server, the replay of what an earlier runner recorded, and time in which the whole process stood still. Calls may run side by
side; what several of them lost at once is lost once.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from rollout_api.records import IntentRecord, ObservationsRecord, Record, ResponseRecord

Span = tuple[float, float]
"""Beginning and end, by one clock."""
T = TypeVar("T")

TICK_SECONDS = 5.0
"""A clock that runs is read at least so often."""


class WorkingTime:
    """The loop's time, without stretches in which this process stood still: stopped (SIGSTOP, Ctrl-Z), or frozen with its
    container. It recognises them by two readings that lie more than twice `TICK_SECONDS` apart.
    """

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._read_at = self._time()
        self._stood_still = 0.0

    def __call__(self) -> float:
        now = self._time()
        if now - self._read_at > 2 * TICK_SECONDS:
            self._stood_still += now - self._read_at
        self._read_at = now
        return now - self._stood_still


class AgentClock:
    """Counts from `start` on. All times are seconds; `used_before` was used under earlier runners (`agent_seconds_of`)."""

    def __init__(self, seconds: float, used_before: float = 0.0, now: Callable[[], float] | None = None) -> None:
        self.seconds = seconds
        """What the agent has in all."""
        self.expired = False
        """Whether `running` ended the agent because its time was over."""
        self.now = now or WorkingTime()
        self._used_before = used_before
        self._started: float | None = None
        self._lost: list[Span] = []
        """Apart from each other, in order."""
        self._waits: dict[object, float] = {}
        """What keeps the agent waiting now, and since when."""
        self._timeout: asyncio.Timeout | None = None
        self._tick: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Count from now on."""
        self._started = self.now()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count to the end of the block. Raises TimeoutError when the time is over, and `expired` is set then."""
        self.start()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeout = timeout
                self._keep_ticking()
                yield
        finally:
            if self._tick is not None:
                self._tick.cancel()
            self.expired, self._timeout = timeout.expired(), None
            self.wait(self)

    def used(self) -> float:
        """Seconds that count so far."""
        if self._started is None:
            return self._used_before
        now = self.now()
        lost = self._lost if not self._waits else union([*self._lost, *((at, now) for at in self._waits.values())])
        return self._used_before + now - self._started - sum(end - begin for begin, end in lost)

    def left(self) -> float:
        """What the agent has left; more than 0 always, for those who want a deadline of it."""
        return max(0.001, self.seconds - self.used())

    async def untimed(self, waiting: Awaitable[T]) -> T:
        """Wait for something without using up the agent's time."""
        reason = object()
        self.wait(reason)
        try:
            return await waiting
        finally:
            self.go_on(reason)

    def wait(self, reason: object) -> None:
        """From now on this keeps the agent waiting."""
        self._waits.setdefault(reason, self.now())
        self._reschedule()

    def go_on(self, reason: object) -> None:
        """End that wait, if it has begun."""
        if (since := self._waits.pop(reason, None)) is not None:
            self.excuse(since, self.now())

    def excuse(self, begin: float, end: float) -> None:
        """Do not count that time."""
        if self._started is not None and end > (begin := max(begin, self._started)):
            self._lost = union([*self._lost, (begin, end)])
        self._reschedule()

    def _keep_ticking(self) -> None:
        self._reschedule()
        self._tick = asyncio.get_running_loop().call_later(TICK_SECONDS, self._keep_ticking)

    def _reschedule(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            # A timer that is set for later would go off when a process that stood still continues.
            is_set = not self._waits and (left := self.seconds - self.used()) <= TICK_SECONDS
            self._timeout.reschedule(asyncio.get_running_loop().time() + left if is_set else None)


def union(spans: Sequence[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def agent_seconds_of(records: Sequence[Record]) -> float:
    """Seconds that the agent had used when the last of these records was written."""
    timed = (
        record for record in reversed(records) if isinstance(record, IntentRecord | ResponseRecord | ObservationsRecord)
    )
    return next((record.agent_seconds for record in timed if record.agent_seconds is not None), 0.0)
