"""Stops a run whose agent is broken: its own code raises the same exception in all of the first rollouts. Without this, an
error in the agent's code would be the reward 0 of every rollout.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final

from agent_runtime.extensions import place_and_error
from rollout_api.records import Outcome, Result

FIRST: Final = 8
"""Rollouts that must raise the same. A single one may raise because of an unusual answer."""
HOLD_SECONDS: Final = 60.0
"""Longest wait of a rollout for the others. An error in the code shows within seconds, and the wait uses a place."""
LOOK_SECONDS: Final = 1.0
"""Interval of checks whether others are running. At the start of a run, they start within this time."""


class AgentBroken(Exception):
    """The agent's own code raises in every rollout. The message has the traceback."""

    def __init__(self, traceback: str) -> None:
        super().__init__(
            f"The agent's own code raised the same exception in each of the first {FIRST} rollouts, so the run was "
            f"stopped: {place_and_error(traceback)[1]}\n{traceback.rstrip()}\n"
            "Correct the code, and run the same command again to resume."
        )


class FirstEnds:
    """The ends of a run's first agents. An agent that raised waits here, before its end is recorded, until it is known
    whether others do better.
    """

    def __init__(self, *, is_over: bool = False) -> None:
        self._is_over = is_over
        """Whether an agent has ended without raising, so that agents are not broken."""
        self._raised = ""
        self._count = self._waiting = self._running = 0
        self._news = asyncio.Event()
        self._broken: AgentBroken | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a rollout as running during the block."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def ended(self, traceback: str | None) -> None:
        """Return when this end may be recorded. `traceback`: of the agent's own exception. Raises AgentBroken."""
        if self._is_over:
            return
        raised = "" if traceback is None else _place_of(traceback)
        if traceback is None or self._raised not in ("", raised):
            self._is_over = True
            self._news.set()
            return
        self._raised = raised
        self._count += 1
        if self._count >= FIRST:
            self._broken = AgentBroken(traceback)
            self._news.set()
        self._waiting += 1
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                await self._others()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        if self._broken is not None:
            raise self._broken

    async def _others(self) -> None:
        """Return when it is known whether others raise the same, or when no other is running."""
        while not self._news.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_SECONDS)
            if self._waiting >= self._running:
                return


def ended_well(result: Result) -> bool:
    """Whether the agent of a sealed rollout has ended without raising."""
    return result.outcome is Outcome.COMPLETED and result.traceback is None


def _place_of(traceback: str) -> str:
    """Return the line that raised the exception, and its type. Messages may contain what the policy wrote."""
    place, error = place_and_error(traceback)
    return f"{place} {error.partition(':')[0]}"
