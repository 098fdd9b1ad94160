"""The deadline of an agent that is driven turn by turn: it stands still while the agent waits for what is not its own.

That is storage, plugins, an environment, a model server at which nobody can be answered. Several of these may keep it
waiting at once; it goes on when the last of them is over.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class AgentDeadline:
    """All times are seconds. Outside of `running` nothing is counted, and nothing ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """What the agent has in all."""
        self.expired = False
        """Whether the agent was ended because its time was over."""
        self._timeout: asyncio.Timeout | None = None
        self._left = 0.0
        """Of the agent's time while the deadline stands still."""
        self._waits: set[object] = set()
        """What keeps the agent waiting now."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count from here to the end of the block. Raises TimeoutError when the time is over, and `expired` is set then."""
        timeout = asyncio.timeout(self.seconds)
        try:
            async with timeout:
                self._timeout = timeout
                yield
        finally:
            self.expired, self._timeout = timeout.expired(), None

    def left(self) -> float:
        """What the agent has left; more than 0 always, for those who want a deadline of it."""
        timeout = self._timeout
        if timeout is None:
            return self.seconds
        when = timeout.when()
        return max(0.001, self._left if when is None else when - asyncio.get_running_loop().time())

    def shift(self, seconds: float) -> None:
        """Give the agent so much more, or less where it is negative."""
        timeout = self._timeout
        if timeout is None or timeout.expired():
            return
        if (when := timeout.when()) is None:
            self._left += seconds
        else:
            timeout.reschedule(when + seconds)

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
        self._waits.add(reason)
        timeout = self._timeout
        if timeout is not None and not timeout.expired() and (when := timeout.when()) is not None:
            self._left = when - asyncio.get_running_loop().time()
            timeout.reschedule(None)

    def go_on(self, reason: object) -> None:
        """It does so no longer."""
        self._waits.discard(reason)
        timeout = self._timeout
        if not self._waits and timeout is not None and not timeout.expired() and timeout.when() is None:
            timeout.reschedule(asyncio.get_running_loop().time() + self._left)
