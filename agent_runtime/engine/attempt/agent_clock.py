"""The clock of an agent: the time that it has used, over all runners of the attempt.

Waiting for other components does not count: storage, plugins, an environment, a failing model server, the replay of an
earlier runner's records, and time in which the whole process was stopped. If concurrent calls wait at the same time,
that time is excluded once.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from agent_runtime.executor.timing import LEAST_SECONDS, TICK_SECONDS, WorkingTime
from rollout_api.records import IntentRecord, ObservationsRecord, Record, ResponseRecord

Span = tuple[float, float]
"""Begin and end, on one clock."""
T = TypeVar("T")


class AgentClock:
    """Counts from `start`. All times are in seconds. `used_before` is the time used under earlier runners
    (`agent_seconds_of`).
    """

    def __init__(self, seconds: float, used_before: float = 0.0, now: Callable[[], float] | None = None) -> None:
        self.seconds = seconds
        """The agent's total time."""
        self.expired = False
        """Whether `running` ended the agent because its time was over."""
        self.now = now or WorkingTime()
        self._used_before = used_before
        self._started: float | None = None
        self._lost: list[Span] = []
        """Disjoint spans, in order."""
        self._lost_before: list[Span] = []
        """Spans of Unix time under earlier runners that are part of `used_before`, but do not count."""
        self._waits: dict[object, float] = {}
        """Reasons for current waits, with their begin."""
        self._silent = 0.0
        """How long sandboxes were silent, in `silences` that have ended."""
        self._timeout: asyncio.Timeout | None = None
        self._tick: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start counting."""
        self._started = self.now()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count until the end of the block. Raises TimeoutError, and sets `expired`, when the time is over."""
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
            self.begin_wait(self)

    def used(self) -> float:
        """Return the seconds that count so far."""
        before = max(0.0, self._used_before - sum(end - begin for begin, end in self._lost_before))
        if self._started is None:
            return before
        now = self.now()
        lost = self._lost if not self._waits else union([*self._lost, *((at, now) for at in self._waits.values())])
        return before + now - self._started - sum(end - begin for begin, end in lost)

    def left(self) -> float:
        """Return the agent's remaining time; always more than 0, so that it can be used as a deadline."""
        return max(LEAST_SECONDS, self.seconds - self.used())

    async def untimed(self, waiting: Awaitable[T]) -> T:
        """Wait for something without using the agent's time."""
        reason = object()
        self.begin_wait(reason)
        try:
            return await waiting
        finally:
            self.end_wait(reason)

    def begin_wait(self, reason: object) -> None:
        """Begin a wait that does not count."""
        self._waits.setdefault(reason, self.now())
        self._keep_ticking()

    def end_wait(self, reason: object) -> None:
        """End that wait if it has begun."""
        if (since := self._waits.pop(reason, None)) is not None:
            self.exclude(since, self.now())

    def pauses(self) -> Callable[[bool], None]:
        """Return a function that begins a wait when it is called with True, and ends it with False."""
        reason = object()
        return lambda begins: self.begin_wait(reason) if begins else self.end_wait(reason)

    def silences(self) -> Callable[[bool], None]:
        """Return a function to be called with True each time that a sandbox was silent, and with False when it answers.

        In all, at most `seconds` of silence do not count, because a policy may be able to cause it.
        """
        reason = object()

        def report(is_silent: bool) -> None:
            since = self._waits.get(reason)
            silent = self._silent + (0.0 if since is None else self.now() - since)
            if is_silent and silent < self.seconds:
                self.begin_wait(reason)
            else:
                self._silent = silent
                self.end_wait(reason)

        return report

    def exclude(self, begin: float, end: float) -> None:
        """Exclude a span of time from the agent's time."""
        if self._started is not None and end > (begin := max(begin, self._started)):
            self._lost = union([*self._lost, (begin, end)])
        self._keep_ticking()

    def exclude_earlier(self, begin: float, end: float) -> None:
        """Exclude a span of Unix time under an earlier runner, which had counted it."""
        self._lost_before = union([*self._lost_before, (begin, end)])
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        """End the agent if its time is over, and look again soon: a process may be stopped and continued, and a timer for
        the remaining time would then expire immediately.
        """
        if self._tick is not None:
            self._tick.cancel()
        if self._timeout is None or self._timeout.expired():
            return
        loop, left = asyncio.get_running_loop(), math.inf if self._waits else self.seconds - self.used()
        if left > 0:
            self._tick = loop.call_later(min(max(left, LEAST_SECONDS), TICK_SECONDS), self._keep_ticking)
        else:
            self._timeout.reschedule(loop.time())


def union(spans: Sequence[Span]) -> list[Span]:
    """Merge overlapping spans and sort them."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def agent_seconds_of(records: Sequence[Record]) -> float:
    """Return the seconds that the agent had used when the last of these records was written."""
    return last_timed(records)[1]


def last_timed(records: Sequence[Record]) -> tuple[float, float]:
    """Return when the last record that has `agent_seconds` was written (Unix time), and its `agent_seconds`; (0, 0) without
    such a record.
    """
    timed = (
        record for record in reversed(records) if isinstance(record, IntentRecord | ResponseRecord | ObservationsRecord)
    )
    return next(((found.time, found.agent_seconds) for found in timed if found.agent_seconds is not None), (0.0, 0.0))
