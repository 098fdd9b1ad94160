"""Time for deadlines and waits: a clock that leaves out times when this process was stopped, which the engine uses too;
and waiting for a change with a time limit, cheaper than asyncio's conditions and tasks, because every command waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

TICK_SECONDS = 5.0
"""Callers must read a `WorkingTime` at least this often while they measure."""
LEAST_SECONDS = 0.001
"""Shortest time until a clock is looked at again. A rest that is smaller than the clock's steps would never pass."""


class WorkingTime:
    """The event loop's time, without periods in which this process was stopped (SIGSTOP, Ctrl-Z) or frozen with its
    container. It detects them by two readings more than twice `TICK_SECONDS` apart. `time` replaces the loop's time.
    """

    def __init__(self, time: Callable[[], float] | None = None) -> None:
        self._time = time or asyncio.get_running_loop().time
        self._read_at = self._time()
        self.stood_still = 0.0
        """Seconds that it has left out."""

    def __call__(self) -> float:
        now = self._time()
        if now - self._read_at > 2 * TICK_SECONDS:
            self.stood_still += now - self._read_at
        self._read_at = now
        return now - self.stood_still


def leave_out_standstills() -> None:
    """Make the running loop's clock a `WorkingTime`, so that none of its timers expires because this process stood still."""
    loop = asyncio.get_running_loop()
    loop.time = WorkingTime(loop.time)  # type: ignore[method-assign]

    def read() -> None:
        loop.call_later(TICK_SECONDS, read)

    read()


def stood_still() -> float:
    """Return the seconds that the running loop's clock has left out since `leave_out_standstills`."""
    clock = asyncio.get_running_loop().time
    return clock.stood_still if isinstance(clock, WorkingTime) else 0.0


@contextlib.asynccontextmanager
async def working_timeout(seconds: float) -> AsyncIterator[WorkingTime]:
    """Like `asyncio.timeout`, but by a `WorkingTime`, which it yields."""
    loop, clock = asyncio.get_running_loop(), WorkingTime()
    ends = clock() + seconds
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal timer
            if (left := ends - clock()) > 0:
                timer = loop.call_later(min(max(left, LEAST_SECONDS), TICK_SECONDS), look)
            else:
                timeout.reschedule(loop.time())

        look()
        try:
            yield clock
        finally:
            if timer is not None:
                timer.cancel()


class Notifier:
    """Wakes waiters on a change; they check the state themselves."""

    def __init__(self) -> None:
        self._wakers: set[Callable[[], None]] = set()

    def notify(self) -> None:
        """Wake all current waiters."""
        if self._wakers:
            wakers, self._wakers = self._wakers, set()
            for wake in wakers:
                wake()

    def add(self, wake: Callable[[], None]) -> None:
        """Have the next `notify` call `wake` synchronously."""
        self._wakers.add(wake)

    def discard(self, wake: Callable[[], None]) -> None:
        """Undo an `add` if `wake` was not called yet."""
        self._wakers.discard(wake)

    @staticmethod
    async def wait(*notifiers: Notifier, seconds: float | None = None) -> None:
        """Return when one of the notifiers is notified, or the time is over."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        wake = partial(_wake, waiter)
        timer = None if seconds is None else loop.call_later(seconds, wake)
        for notifier in notifiers:
            notifier.add(wake)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            for notifier in notifiers:
                notifier.discard(wake)


async def until_ready(descriptor: int, *, writable: bool = False) -> None:
    """Return when a descriptor is readable, or writable. A process descriptor is readable when its process has ended."""
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    waiter: asyncio.Future[None] = loop.create_future()
    add(descriptor, _wake, waiter)
    try:
        await waiter
    finally:
        remove(descriptor)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
