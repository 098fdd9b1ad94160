"""SIGTERM gives running turns a limited time to end, and none if the job was deleted."""

import asyncio
from typing import Any

import pytest

from agent_runtime.kube.api import ApiError
from agent_runtime.runner.drain import Stopping
from rollout_api.conditions import Metadata

pytestmark = pytest.mark.usefixtures("virtual_clock")

JOB = Metadata(name="job", namespace="team", uid="uid-1")


class Api:
    """Answers when the test allows it."""

    def __init__(self, answer: dict[str, Any] | ApiError) -> None:
        self.answer, self.answers, self.asked = answer, asyncio.Event(), 0

    async def get_job(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        self.asked += 1
        await self.answers.wait()
        if isinstance(self.answer, ApiError):
            raise self.answer
        return self.answer

    async def get_shard(self, name: str, **_: Any) -> dict[str, Any]:
        raise AssertionError("whoever stops reads no report")

    async def apply_report(self, name: str, report: dict[str, Any], **_: Any) -> None:
        raise AssertionError("whoever stops reports nothing by itself")


async def soon(event: asyncio.Event) -> None:
    """Wait for it; fail if it does not come."""
    async with asyncio.timeout(10):
        await event.wait()


@pytest.mark.parametrize("answer", [{"metadata": {"uid": "uid-1"}}, ApiError(0, "Unreachable", "")])
async def test_turns_that_do_not_end_are_cut_off_at_the_deadline(answer: dict[str, Any] | ApiError) -> None:
    api, seconds = Api(answer), 0.2
    stopping = Stopping(api, JOB, seconds=seconds)
    started = asyncio.get_running_loop().time()
    stopping.begin()
    assert stopping.drain.requested, "no turn may start, even while nobody has said what becomes of the job"
    await asyncio.sleep(seconds / 2)
    api.answers.set()
    await soon(stopping.stop)
    # Counted from SIGTERM, as the kubelet does, not from the API server's answer.
    assert asyncio.get_running_loop().time() - started == pytest.approx(seconds)
    assert not stopping.cancelled.is_set()


async def test_deleted_job_waits_for_no_turn() -> None:
    api = Api(ApiError(404, "NotFound", ""))
    stopping = Stopping(api, JOB, seconds=60)
    stopping.begin()
    api.answers.set()
    await soon(stopping.cancelled)
    assert not stopping.stop.is_set()


async def test_a_second_signal_changes_nothing() -> None:
    api = Api({"metadata": {"uid": "uid-1"}})
    api.answers.set()
    stopping = Stopping(api, JOB, seconds=0.05)
    stopping.begin()
    stopping.begin()
    await soon(stopping.stop)
    assert api.asked == 1
