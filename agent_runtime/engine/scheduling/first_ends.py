"""Stops a run whose agent is broken: its own code raises the same exception in all of the first rollouts. Without this, an
error in the agent's code would be the reward 0 of every rollout.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
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
        raised = f"The agent's own code raised the same exception in each of the first {FIRST} rollouts"
        what = f"{place_and_error(traceback)[1]}\n{traceback.rstrip()}"
        self.why = f"{raised}: {what}"
        """The message without what happens to the run."""
        super().__init__(
            f"{raised}, so the run was stopped: {what}\nCorrect the code, and run the same command again to resume."
        )


async def _no_others() -> Iterable[Result]:
    return ()


class FirstEnds:
    """The ends of a run's first agents. An agent that raised waits here, before its end is recorded, until it is known
    whether others do better. `sealed` are results of earlier processes of this shard. `read_others` returns those of
    the run's other shards; it is called only if a share of the first rollouts has raised the same here.
    """

    def __init__(
        self,
        sealed: Iterable[Result] = (),
        *,
        shards: int = 1,
        read_others: Callable[[], Awaitable[Iterable[Result]]] = _no_others,
    ) -> None:
        self._sealed = _ends(sealed)
        self._shards, self._read_others = shards, read_others
        self._is_over = None in self._sealed
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
        raised = None if traceback is None else _place_of(traceback)
        if traceback is None or raised is None or self._raised not in ("", raised):
            self._end()
            return
        self._raised = raised
        self._count += 1
        self._judge(traceback, self._sealed)
        self._waiting += 1
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                await self._others()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        if not self._news.is_set() and self._shards > 1 and self._count * self._shards >= FIRST:
            # The others here still wait meanwhile, and until this rollout is sealed, because it runs and does not wait.
            self._judge(traceback, self._sealed + _ends(await self._read_others()))
        if self._broken is not None:
            raise self._broken

    def _end(self) -> None:
        self._is_over = True
        self._news.set()

    def _judge(self, traceback: str, sealed: Counter[str | None]) -> None:
        """Decide by the ends of this process, all of which raised the same, and those that others have sealed."""
        if None in sealed:
            self._end()
            return
        # If sealed rollouts raised elsewhere, an earlier process may have had other code.
        same = sealed[self._raised] if len(sealed) == 1 else 0
        if self._count + same >= FIRST:
            self._broken = AgentBroken(traceback)
            self._news.set()

    async def _others(self) -> None:
        """Return when it is known whether others raise the same, or when no other is running."""
        while not self._news.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_SECONDS)
            if self._waiting >= self._running:
                return


def _ends(results: Iterable[Result]) -> Counter[str | None]:
    """Return the number of agents by where they raised, up to the first one that did not, which is None."""
    places = Counter[str | None]()
    for result in results:
        if result.outcome is Outcome.COMPLETED:
            place = None if result.traceback is None else _place_of(result.traceback)
            places[place] += 1
            if place is None:
                break
    return places


def _place_of(traceback: str) -> str:
    """Return the line that raised the exception, and its type. Messages may contain what the policy wrote."""
    place, error = place_and_error(traceback)
    return f"{place} {error.partition(':')[0]}"
