"""A graceful stop: no new turns start, running ones are finished and journaled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from agent_runtime.shared_tasks import ended_before

T = TypeVar("T")


class Drain:
    """A stop request, and the rollouts that have reached a point at which they can stop."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._moved = asyncio.Event()
        self.parked = 0
        """Rollouts that wait here; their progress is journaled."""

    @property
    def requested(self) -> bool:
        """Whether a stop was requested, so that no turn, attempt or group may start."""
        return self._requested.is_set()

    def request(self) -> None:
        """Request that all rollouts stop."""
        self._requested.set()

    async def wait(self) -> None:
        """Return when a stop is requested."""
        await self._requested.wait()

    async def park_if_requested(self) -> None:
        """Return at once, unless a stop is requested: then wait to be cancelled."""
        if self.requested:
            await self.park()

    async def park(self) -> NoReturn:
        """Wait to be cancelled."""
        self.parked += 1
        self._moved.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.parked -= 1
        raise AssertionError("unreachable: the event is never set")

    async def unless_requested(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that may take minutes. If a stop is requested, cancel it and wait to be
        cancelled.
        """
        ended = await ended_before(self.wait(), waiting)
        return await self.park() if ended is None else ended.result()

    def note_end(self) -> None:
        """Record that a rollout has ended."""
        self._moved.set()

    async def moved(self) -> None:
        """Return when a rollout has parked or ended since the last call."""
        await self._moved.wait()
        self._moved.clear()
