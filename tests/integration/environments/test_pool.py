"""Environments in real processes: none blocks the engine or affects its neighbours."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime.environments.act import ACT, Act
from agent_runtime.environments.host import EnvironmentFailure
from agent_runtime.environments.open import open_environment
from agent_runtime.environments.pool import EnvironmentPool, PoolEpisode
from agent_runtime.sandboxes.base import Evidence, Workspace
from agent_runtime.tools.base import ToolContext, ToolWorkspace
from rollout_api.environments import TaskEnvironment
from rollout_api.records import Observation, ObservationsRecord, Record
from rollout_api.tasks import Task, Timeouts

OWN = ["tests.support.games:Game"]
NO_WORKSPACE = cast(ToolWorkspace, None)
SHORT = Timeouts(command_seconds=1)
"""Time limits with a short step. The limit of a start is the default, because a new process may take more than a
second.
"""


@pytest.fixture
async def pool() -> AsyncIterator[EnvironmentPool]:
    """One process, so that all episodes are neighbours."""
    made = EnvironmentPool(OWN, 1)
    yield made
    await made.close()


def game(pool: EnvironmentPool, timeouts: Timeouts = SHORT, **config: Any) -> PoolEpisode:
    return pool.episode(TaskEnvironment(id="tests.support.games:Game", seed=7, config=config), timeouts)


async def test_hanging_step_ends_at_its_deadline_while_the_engine_continues(pool: EnvironmentPool) -> None:
    episode = game(pool)
    await episode.start([])
    hanging = asyncio.create_task(episode.take([], "hang", NO_WORKSPACE))
    beats = 0
    while not hanging.done():
        await asyncio.sleep(0.05)
        beats += 1
    with pytest.raises(EnvironmentFailure, match=r"EnvironmentHung: .* did not answer within 1 s"):
        await hanging
    assert beats > 5


@pytest.mark.parametrize(("action", "reason"), [("hang", "EnvironmentHung"), ("die", "EnvironmentDied")])
async def test_neighbours_of_a_failed_environment_continue(pool: EnvironmentPool, action: str, reason: str) -> None:
    calm, waiting, broken = game(pool), game(pool), game(pool)
    await asyncio.gather(calm.start([]), waiting.start([]), broken.start([]))
    await calm.take([], "a", NO_WORKSPACE)
    breaking = asyncio.create_task(broken.take([], action, NO_WORKSPACE))
    await asyncio.sleep(0)
    behind = asyncio.create_task(waiting.take([], "b", NO_WORKSPACE))
    with pytest.raises(EnvironmentFailure, match=reason):
        await breaking
    assert [move.observation for move in await behind] == ["b 1"]
    assert [move.observation for move in await calm.take(["a"], "c", NO_WORKSPACE)] == ["a 1", "c 2"]


@pytest.mark.parametrize("action", ["hang", "die", "raise"])
async def test_failure_that_needs_a_neighbour_does_not_count(pool: EnvironmentPool, action: str) -> None:
    neighbour, episode = game(pool), game(pool)
    await asyncio.gather(neighbour.start([]), episode.start([]))
    await episode.take([], "a", NO_WORKSPACE)
    failing = f"crowded {action}"
    assert [move.observation for move in await episode.take(["a"], failing, NO_WORKSPACE)] == ["a 1", f"{failing} 2"]
    assert [move.observation for move in await neighbour.take([], "b", NO_WORKSPACE)] == ["b 1"]


@pytest.mark.parametrize("failure", ["hang", "die", "raise"])
async def test_failure_of_what_an_environment_calls_is_not_blamed_on_the_action(
    pool: EnvironmentPool, tmp_path: Path, failure: str
) -> None:
    times, outage = Timeouts(setup_seconds=2, command_seconds=1), tmp_path / "outage"
    episode, other = game(pool, times, outage=str(outage)), game(pool)
    await episode.start([])
    with pytest.raises(EnvironmentFailure) as by_action:
        await episode.take([], failure, NO_WORKSPACE)
    assert not by_action.value.failed_trial
    outage.write_text(failure)
    with pytest.raises(EnvironmentFailure, match="a trial step without the policy's actions failed too") as by_outage:
        await episode.take([], "a", NO_WORKSPACE)
    assert by_outage.value.failed_trial
    assert by_outage.value.reason == by_action.value.reason
    await other.start([])


async def test_resumed_episode_has_the_time_of_a_step_for_each_repeated_step(pool: EnvironmentPool) -> None:
    environment = TaskEnvironment(id="tests.support.games:Game")
    task = Task(name="t", prompt="{observation}", timeouts=Timeouts(command_seconds=4), environment=environment)
    context = ToolContext(workspace=NO_WORKSPACE, task=task, call_id="c", seconds_left=60)

    async def opened(recorded: Sequence[Record] = ()) -> Act:
        return await open_environment(task, pool, cast(Workspace, None), recorded, epoch=1)

    killed = await opened()
    taken = [await killed.execute({"action": "slow"}, context) for _ in range(3)]
    killed.close()
    results = [Observation(call_id="c", tool=ACT, content=step.content, data=dict(step.data)) for step in taken]
    resumed = await opened([ObservationsRecord(turn=0, time=0, results=results)])
    assert (await resumed.execute({"action": "a"}, context)).content == "a 4"
    results[2].data["reward"] = 2.0
    with pytest.raises(EnvironmentFailure, match=r"EnvironmentDiverged: .* gave reward 1, but 2 before"):
        await (await opened([ObservationsRecord(turn=0, time=0, results=results)])).execute({"action": "a"}, context)


async def test_hanging_reset_ends_at_its_deadline(pool: EnvironmentPool) -> None:
    with pytest.raises(EnvironmentFailure, match="EnvironmentHung"):
        await game(pool, Timeouts(setup_seconds=1), slow_reset=True).start([])


async def test_environment_that_raises_differs_from_one_that_hangs(pool: EnvironmentPool) -> None:
    episode = game(pool)
    await episode.start([])
    with pytest.raises(EnvironmentFailure, match="RuntimeError: it broke") as failure:
        await episode.take([], "raise", NO_WORKSPACE)
    assert failure.value.evidence is Evidence.NOT_LOST, "its own code, and not the policy, is to blame"


async def test_rollout_cancelled_in_a_step_does_not_mix_up_the_answers_of_others(pool: EnvironmentPool) -> None:
    one, other = game(pool, Timeouts()), game(pool, Timeouts())
    await asyncio.gather(one.start([]), other.start([]))
    cancelled = asyncio.create_task(one.take([], "a", NO_WORKSPACE))
    await asyncio.sleep(0)
    cancelled.cancel()
    one.close()
    assert [move.observation for move in await other.take([], "b", NO_WORKSPACE)] == ["b 1"]


async def test_episodes_are_spread_over_the_allowed_number_of_processes() -> None:
    pool = EnvironmentPool(OWN, 2)
    try:
        episodes = [game(pool, Timeouts(), drift=True) for _ in range(4)]
        await asyncio.gather(*(episode.start([]) for episode in episodes))
        moves = [(await episode.take([], "a", NO_WORKSPACE))[-1].observation for episode in episodes]
    finally:
        await pool.close()
    assert sorted(moves.count(move) for move in set(moves)) == [2, 2]


async def test_an_environment_never_sees_the_runners_credentials(
    pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    process = await pool.place(1)
    async with asyncio.timeout(10):
        # It is empty while the process replaces its program.
        while not (environment := Path(f"/proc/{process.process.pid}/environ").read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "AWS_SECRET" not in environment
    assert "PATH=" in environment


def test_hanging_environment_ends_with_its_engine() -> None:
    command = [sys.executable, "-m", "agent_runtime.environments.hosted.worker"]
    start = {"id": "tests.support.games:Game", "seed": 1, "maxSteps": 5, "formatPenalty": 0, "config": {}}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"episode": 1, "start": start, "actions": []}).encode() + b"\n")
        process.stdin.write(json.dumps({"episode": 1, "actions": ["hang"]}).encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdin.close()
        assert process.wait(timeout=60) == 0
