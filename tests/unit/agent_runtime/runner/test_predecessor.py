"""A runner that starts while another one drains must neither take over its turns, nor wait for a dead one."""

import asyncio
from typing import Any

import pytest

from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.kube.api import ApiError
from agent_runtime.runner import predecessor
from agent_runtime.runner.predecessor import LONGEST_SECONDS, patience, wait_for_predecessor
from agent_runtime.runner.supervisor import SINCE
from rollout_api.conditions import Metadata

pytestmark = pytest.mark.usefixtures("virtual_clock")

JOB = Metadata(name="job", namespace="team", uid="uid-1")
DRAINS = {"index": 1, "state": "Draining", "running": 3}
PARKED = {"index": 1, "state": "Draining", "running": 0}
RUNS = {"index": 1, "state": "Running", "running": 3}


class Api:
    """Gives one answer after the other, and repeats the last one."""

    def __init__(self, *answers: dict[str, Any] | ApiError) -> None:
        self.answers, self.asked = answers, 0

    async def get_job(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        raise AssertionError("the job says nothing of its runners")

    async def get_shard(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        assert name == "job-uid-1-1", "the report of another runner"
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, ApiError):
            raise answer
        return {"metadata": {"name": name}, "status": answer}

    async def apply_report(self, name: str, report: dict[str, Any], **_: Any) -> None:
        raise AssertionError("whoever waits has nothing to report")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predecessor, "POLL_SECONDS", 0.01)


async def waited(api: Api, drain: Drain | None = None, *, seconds: float = 10) -> int:
    """Return how many requests it made before it continued."""
    async with asyncio.timeout(5):
        await wait_for_predecessor(api, JOB, 1, drain or Drain(), seconds=seconds)
    return api.asked


async def test_drains_of_earlier_runners_are_known() -> None:
    for answers, drains in [
        (({},), 0),
        ((RUNS | {"drains": 2},), 2),
        ((DRAINS | {"drains": 1}, PARKED | {"drains": 2}), 2),
    ]:
        assert await wait_for_predecessor(Api(*answers), JOB, 1, Drain(), seconds=10) == drains


@pytest.mark.parametrize("standing", [{}, RUNS, PARKED])
async def test_predecessor_that_does_not_drain_is_not_awaited(standing: dict[str, Any]) -> None:
    assert await waited(Api(standing, DRAINS)) == 1


@pytest.mark.parametrize("last", [PARKED, RUNS, DRAINS | {"state": "Completed"}])
async def test_runner_continues_when_the_last_turn_is_finished(last: dict[str, Any]) -> None:
    assert await waited(Api(DRAINS, DRAINS, last)) == 3


async def test_killed_draining_predecessor_is_awaited_for_a_limited_time() -> None:
    assert await waited(Api(DRAINS), seconds=0.1) > 1


def test_an_engine_after_a_killed_one_waits_only_the_remaining_time() -> None:
    assert patience({}, 1000.0) == LONGEST_SECONDS
    assert patience({SINCE: "1000.0"}, 1012.0) == LONGEST_SECONDS - 12
    assert patience({SINCE: "1000.0"}, 5000.0) == 0


async def test_unavailable_api_server_delays_nothing() -> None:
    assert await waited(Api(ApiError(0, "Unreachable", ""))) == 1


async def test_stopping_runner_ends_its_wait() -> None:
    api, drain = Api(DRAINS), Drain()
    waiting = asyncio.create_task(waited(api, drain))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    drain.request()
    await waiting
