"""Our engine, run through `run_job` as a user would, in a separate process.

Workspaces are in memory, because the called tool does nothing; workspaces.py measures the cost of a workspace.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent_runtime.engine.events import Event, JobStarted, RolloutSealed, RolloutStarted, TurnEnded
from agent_runtime.engine.run import run_job
from agent_runtime.recording.epoch_log import EpochLog
from benchmarks.conversation import answer_questions
from benchmarks.measuring import Meter, pin_to_core
from rollout_api.manifest import validate
from rollout_api.records import Record
from rollout_api.rollout_job import RolloutJob
from tests.support.dummy_sandboxes import DummyProvider

MEASURED_CORE = 0


@dataclass
class _Seen:
    """Counts the run's events."""

    stop_after: int | None
    stop: asyncio.Event
    started: float = field(default_factory=time.perf_counter)
    first_rollout: float | None = None
    turns: int = 0
    sealed_before: int = 0
    sealed: int = 0
    failed: list[str] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0
    first_turn: dict[int, float] = field(default_factory=dict)
    last_turn: dict[int, tuple[int, float]] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        """An `Observer`."""
        if isinstance(event, TurnEnded):
            self.turns += 1
            now = time.perf_counter()
            self.first_turn.setdefault(event.index, now)
            self.last_turn[event.index] = (event.turn, now)
        elif isinstance(event, JobStarted):
            self.sealed_before = event.sealed
        elif isinstance(event, RolloutStarted):
            self.first_rollout = self.first_rollout or time.perf_counter()
            self.open_now += 1
            self.open_most = max(self.open_most, self.open_now)
        elif isinstance(event, RolloutSealed):
            self.sealed += 1
            self.open_now -= 1
            if event.result.outcome != "Completed" or event.result.stop_reason != "Finished":
                self.failed.append(f"{event.result.outcome} {event.result.stop_reason} {event.result.message}")
            if self.sealed == self.stop_after:
                self.stop.set()

    def turn_seconds(self) -> float | None:
        """Return the mean time from one turn's answer to the next one's, within a rollout."""
        between = [
            (ended - self.first_turn[index]) / turn for index, (turn, ended) in self.last_turn.items() if turn > 0
        ]
        return sum(between) / len(between) if between else None


async def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Run a job and return its cost and totals. The question is {job, environ, stop_after, journal}.

    After `stop_after` seals the run is stopped so that it can be resumed. If `journal` is false, records of turns are not
    written.
    """
    job = validate(RolloutJob, question["job"])
    stop = asyncio.Event()
    journaled = EpochLog.append
    if not question.get("journal", True):
        EpochLog.append = _unwritten  # type: ignore[method-assign]
    meter = Meter()
    seen = _Seen(question.get("stop_after"), stop)
    try:
        await run_job(
            job,
            base_dir=Path("/"),
            environ={**os.environ, **question.get("environ", {})},
            provider=DummyProvider("benchmark"),
            observer=seen.observe,
            stop=stop,
        )
    finally:
        EpochLog.append = journaled  # type: ignore[method-assign]
    cost = meter.read()
    if seen.failed:
        raise RuntimeError(f"{len(seen.failed)} rollouts did not finish, the first: {seen.failed[0]}")
    return {
        **asdict(cost),
        "turns": seen.turns,
        "sealed_before": seen.sealed_before,
        "sealed": seen.sealed,
        "concurrent": seen.open_most,
        "turn_seconds": seen.turn_seconds(),
        "first_rollout_seconds": None if seen.first_rollout is None else seen.first_rollout - seen.started,
    }


async def _unwritten(self: EpochLog, records: Sequence[Record]) -> None:
    """Replacement of `EpochLog.append`, to measure its cost."""


if __name__ == "__main__":
    pin_to_core(MEASURED_CORE)
    asyncio.run(answer_questions(measure))
