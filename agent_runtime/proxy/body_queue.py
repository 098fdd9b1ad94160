"""The bodies of one session's requests: how many are in memory, and how much of the process's time they take.

Reading the JSON of a body blocks the process, which serves other sessions as well: a body of a few megabytes can have
hundreds of thousands of values, and takes seconds. Requests that are refused count towards no limit. So each session
has a share of the process's time, and its further requests wait.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from agent_runtime.proxy.http import Incoming

MOST_BODIES: Final = 8
"""Bodies of a session that are read at the same time."""
BURST_SECONDS: Final = 1.0
"""Time that a session may take at once: some hundred usual requests with a long conversation."""
SHARE: Final = 0.1
"""Share of the process's time that a session may take after that."""


class BodyQueue:
    """The requests of one session whose bodies are not parsed yet."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_BODIES)
        self._lock = asyncio.Lock()
        self._taken = 0.0
        """Seconds that the session has taken and not yet waited for."""
        self._counted_at = time.monotonic()

    @asynccontextmanager
    async def body(self, request: Incoming, most_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body when it is this request's turn; its time in the block counts. Raises BodyTooLarge."""
        async with self._places:
            body = await request.read(most_bytes)
            async with self.turn():
                yield body

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the session has time for other costly work; the time in the block counts."""
        async with self._lock:
            if (debt := self._debt() - BURST_SECONDS) > 0:
                await asyncio.sleep(debt / SHARE)
            began = time.thread_time()
            try:
                yield
            finally:
                self._taken += time.thread_time() - began

    def _debt(self) -> float:
        now = time.monotonic()
        self._taken = max(0.0, self._taken - (now - self._counted_at) * SHARE)
        self._counted_at = now
        return self._taken
