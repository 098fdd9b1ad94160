"""When a report is delivered: not too often, and at once if another component waits for it."""

import asyncio
from typing import Any

import pytest

from agent_runtime.kube.api import ApiError
from agent_runtime.runner.report import Reporter
from rollout_api.conditions import Metadata
from rollout_api.rollout_job import RunnerReport

pytestmark = pytest.mark.usefixtures("virtual_clock")

LONG = 600.0


class FakeApi:
    def __init__(self) -> None:
        self.taken: list[int | None] = []
        self.refusals = 0
        self.changed = asyncio.Event()

    async def get_job(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        raise AssertionError("nobody asks for the job here")

    async def get_shard(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        raise AssertionError("nobody reads its report here")

    async def apply_report(self, name: str, report: dict[str, Any], **rest: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ApiError(503, "Unavailable", "later")
        self.taken.append(report.get("policyUpdate"))
        self.changed.set()

    async def until_taken(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.taken) < count:
                self.changed.clear()
                await self.changed.wait()


class Runner:
    def __init__(self) -> None:
        self.api, self.update = FakeApi(), 0
        metadata = Metadata(name="job", namespace="team", uid="u")
        self.reporter = Reporter(self.api, metadata, index=0, interval_seconds=LONG, make=self.report)
        self.reporter.start()

    def report(self) -> RunnerReport:
        return RunnerReport(index=0, policy_update=self.update)


async def test_a_policy_update_does_not_wait_for_the_next_report_of_a_large_job() -> None:
    runner = Runner()
    await runner.api.until_taken(1)
    runner.update = 1
    runner.reporter.report_now()
    await runner.api.until_taken(2)
    assert runner.api.taken == [0, 1]
    await runner.reporter.finish()


async def test_an_acknowledgement_that_was_refused_is_delivered_soon_again() -> None:
    runner = Runner()
    await runner.api.until_taken(1)
    runner.update, runner.api.refusals = 1, 2
    runner.reporter.report_now()
    await runner.api.until_taken(2)
    assert runner.api.taken == [0, 1]
    await runner.reporter.finish()


async def test_unimportant_change_waits_and_the_last_report_is_delivered() -> None:
    runner = Runner()
    await runner.api.until_taken(1)
    runner.update = 1
    await asyncio.sleep(0.2)
    assert runner.api.taken == [0]
    await runner.reporter.finish()
    assert runner.api.taken == [0, 1]
