"""Stopping at a good moment: no turn starts any more, those under way are finished and journaled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Drain:
    """A request to stop, and the rollouts that have come to a point at which they can."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._moved = asyncio.Event()
        self.parked = 0
        """Rollouts that wait here; what they did so far is journaled."""

    @property
    def requested(self) -> bool:
        """Whether no turn, attempt or group may start any more."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask all rollouts to come to a stop."""
        self._requested.set()

    async def wait(self) -> None:
        """Return once a stop was asked for."""
        await self._requested.wait()

    async def gate(self) -> None:
        """Pass, unless a stop was asked for: then wait here to be cancelled."""
        if self.requested:
            await self.park()

    async def park(self) -> NoReturn:
        """Wait here to be cancelled."""
        self.parked += 1
        self._moved.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.parked -= 1
        raise AssertionError("that event is never set")

    async def unless_requested(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result of what may take minutes; once a stop is asked for it is cancelled, and this waits to be."""
        work, stop = asyncio.create_task(waiting), asyncio.create_task(self.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
        return await self.park()

    def note_end(self) -> None:
        """A rollout has ended, so that there is one less to wait for."""
        self._moved.set()

    async def moved(self) -> None:
        """Return when a rollout has come to a stop, or has ended, since the last call."""
        await self._moved.wait()
        self._moved.clear()
