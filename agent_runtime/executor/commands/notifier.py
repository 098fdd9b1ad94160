"""Waiting for a change, with a time limit: lighter than conditions and tasks, which is felt once a command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial


class Bell:
    """Rung whenever something has changed; whoever woke up looks for himself what."""

    def __init__(self) -> None:
        self._wakers: set[Callable[[], None]] = set()

    def ring(self) -> None:
        """Wake everybody who waits now."""
        if self._wakers:
            wakers, self._wakers = self._wakers, set()
            for wake in wakers:
                wake()

    def add(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when it is rung next, at once: not a turn of the loop later."""
        self._wakers.add(wake)

    def discard(self, wake: Callable[[], None]) -> None:
        """Take back an `add`, where it still waits."""
        self._wakers.discard(wake)

    @staticmethod
    async def wait(*bells: Bell, seconds: float | None = None) -> None:
        """Return when one of the bells is rung, or the time is over."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        wake = partial(_wake, waiter)
        timer = None if seconds is None else loop.call_later(seconds, wake)
        for bell in bells:
            bell.add(wake)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            for bell in bells:
                bell.discard(wake)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
