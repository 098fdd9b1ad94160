"""The reward of a task with steps, and the workspace of each step."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from agent_runtime.agents.base import AgentContext
from agent_runtime.engine.attempt.assignment import Assignment, Oversight, Rollout
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.snapshots import Checkpoints, Keeping, Snapshots, SnapshotStore
from agent_runtime.engine.attempt.steps import StepwiseAgent, grading_leftovers, missed_minimum, verdict_of_steps
from agent_runtime.engine.attempt.turns import Turns
from agent_runtime.engine.opening import check_tasks
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, WorkspaceSpec
from agent_runtime.tasks import TaskSourceError
from rollout_api.model import Sampling
from rollout_api.records import AttemptRecord, StepRecord, StopReason, Verdict
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.rollout_job import RolloutJob, RolloutJobSpec
from rollout_api.tasks import Task, TaskStep
from tests.support.dummy_sandboxes import DummyProvider, DummyWorkspace
from tests.unit.engine.test_sub_agent import TriesAgain
from tests.unit.engine.test_turns import MemoryJournal

VERIFIER = {"kind": "rewardFile", "commands": ["true"], "files": [{"path": "/tests/a", "content": ""}]}
NO_SPEC = RolloutJobSpec.model_construct()  # type: ignore[call-arg]
REWARDS = st.lists(st.floats(-1, 1), min_size=1, max_size=6)


def task(count: int, how: str = "Mean") -> Task:
    steps = [{"name": f"s{n}", "prompt": "p", "verifier": VERIFIER} for n in range(count)]
    return Task.model_validate({"name": "t", "prompt": "p", "steps": steps, "stepReward": how})


def taken(rewards: list[float]) -> list[StepRecord]:
    return [
        StepRecord(time=time.time(), step=f"s{n}", ended=True, verdict=Verdict(reward=reward, passed=reward == 1))
        for n, reward in enumerate(rewards)
    ]


@given(REWARDS, st.integers(0, 5), st.sampled_from([0.0, -0.5, -1.0]))
def test_ending_early_never_increases_the_reward(rewards: list[float], more: int, least: float) -> None:
    """An agent that continues gets at least as much as one that uses up a limit before steps with rewards of at least
    `failedReward`.
    """
    for how in ("Mean", "Final"):
        whole = task(len(rewards) + more, how)
        early = verdict_of_steps(whole, taken(rewards), least)
        late = verdict_of_steps(whole, taken([*rewards, *[least] * more]), least)
        assert early is not None
        assert late is not None
        assert early.reward <= late.reward + 1e-9 or (more == 0 and early.reward == late.reward)
        assert early.forgeable


@given(REWARDS)
def test_mean_and_final_rewards_equal_those_of_harbor(rewards: list[float]) -> None:
    mean = verdict_of_steps(task(len(rewards)), taken(rewards), 0.0)
    final = verdict_of_steps(task(len(rewards), "Final"), taken(rewards), 0.0)
    assert mean is not None
    assert final is not None
    assert abs(mean.reward - sum(rewards) / len(rewards)) < 1e-9
    assert final.reward == rewards[-1]
    assert mean.passed == all(reward == 1 for reward in rewards)


def test_step_that_was_not_taken_counts_as_0_for_any_reason() -> None:
    verdict = verdict_of_steps(task(2), taken([1.0]), 0.0)
    assert verdict is not None
    assert (verdict.reward, verdict.passed) == (0.5, False)


def test_without_any_step_the_reward_is_that_of_failed_work() -> None:
    for how in ("Mean", "Final"):
        verdict = verdict_of_steps(task(2, how), [], -1.0)
        assert verdict is not None
        assert (verdict.reward, verdict.passed) == (-1.0, False)


def test_steps_after_a_missed_gate_are_left_out_of_the_mean() -> None:
    gated = task(3)
    gated.steps[0].min_rewards["reward"] = 0.6
    verdict = verdict_of_steps(gated, taken([0.5]), 0.0)
    assert verdict is not None
    assert (verdict.reward, verdict.passed) == (0.5, False)


def test_missing_reward_is_below_every_minimum() -> None:
    step = TaskStep.model_validate({"name": "s", "prompt": "p", "minRewards": {"reward": 0.5, "style": 0}})
    assert missed_minimum(step, None) == "reward is not given, below minRewards 0.5"
    assert missed_minimum(step, Verdict(reward=0.5, passed=False)) == "style is not given, below minRewards 0"
    assert missed_minimum(step, Verdict(reward=0.5, rewards={"style": 0.0}, passed=False)) is None


def test_tests_and_rewards_are_removed_before_the_next_step() -> None:
    files = [{"path": path, "content": ""} for path in ("/tests/x/a.py", "hidden.txt")]
    verifier = {"kind": "rewardFile", "commands": ["true"], "files": files}
    graded = Task.model_validate({"name": "t", "prompt": "p", "verifier": verifier})
    assert grading_leftovers(graded) == ["/tests", "/logs/verifier", "hidden.txt"]


class Checkpointing:
    """Saves a checkpoint in each step."""

    async def run(self, context: AgentContext) -> str:
        await context.checkpoint()
        return "done"


def stepped(workspace: DummyWorkspace, journal: MemoryJournal, *, agent_seconds: int = 60) -> Turns:
    steps = [{"name": f"s{n}", "prompt": "p", "files": [{"path": f"f{n}", "content": "x"}]} for n in range(2)]
    stepped_task = Task.model_validate(
        {"name": "t", "prompt": "p", "steps": steps, "timeouts": {"agentSeconds": agent_seconds}}
    )
    store = Store("memory:", MemoryStore())
    snapshots = SnapshotStore(Layers(store, store.below("run")), 10**6)
    return Turns(
        Assignment(Rollout(index=0, group=0, member=0, task=stepped_task, seed=1), AgentSpec(), Sampling()),
        tools={},
        model=lambda: None,
        workspace=workspace,
        log=AttemptLog(journal),
        oversight=Oversight(),
        keeping=Keeping(
            Snapshots(snapshots, None, []),
            Checkpoints(snapshots),
            lambda moved: AttemptRecord(time=0, runner="r", workspace=dict(moved.handle), sandbox={}),
        ),
    )


async def dummy(world: str) -> DummyWorkspace:
    provider = DummyProvider(world)
    return await provider.acquire(WorkspaceSpec("g0", "/w"), attempt="0-0", fence=Fence(1, "a"), name="agent")


async def test_a_step_begins_where_the_agent_works_after_a_checkpoint_and_not_where_it_was(tmp_path: Path) -> None:
    turns = stepped(await dummy(str(tmp_path)), MemoryJournal())
    ended = await turns.run_within_time(StepwiseAgent(Checkpointing, NO_SPEC, epoch=1).run(turns))
    assert ended == (StopReason.FINISHED, "took 2 steps")
    assert [await turns.workspace.read(name) for name in ("f0", "f1")] == [b"x", b"x"]


async def test_no_step_follows_one_whose_agent_was_left_behind(tmp_path: Path) -> None:
    turns = stepped(await dummy(str(tmp_path)), MemoryJournal())
    agent = StepwiseAgent(lambda: TriesAgain(object(), BaseException), NO_SPEC, epoch=1)
    assert (await turns.run_within_time(agent.run(turns)))[0] is StopReason.AGENT_ERROR
    assert turns.left_behind
    turns.next_step()
    await agent.grade(turns)
    steps = [record for record in turns.records if isinstance(record, StepRecord)]
    assert [(step.step, step.ended) for step in steps] == [("s0", False), ("s0", True)]


async def test_a_slow_store_between_two_steps_takes_none_of_the_agents_time(tmp_path: Path) -> None:
    journal = MemoryJournal()
    journal.delay = 0.4
    turns = stepped(await dummy(str(tmp_path)), journal, agent_seconds=1)
    ended = await turns.run_within_time(StepwiseAgent(Checkpointing, NO_SPEC, epoch=1).run(turns))
    assert ended == (StopReason.FINISHED, "took 2 steps")


@pytest.mark.parametrize(
    ("verifiers", "server", "is_refused"),
    [
        ([VERIFIER, VERIFIER], {"command": ["serve"]}, True),
        ([None, VERIFIER], {"command": ["serve"]}, False),
        ([VERIFIER, VERIFIER], {"url": "http://tools.example/mcp"}, False),
    ],
)
async def test_servers_that_the_grading_of_a_step_would_end_are_refused(
    verifiers: list[Any], server: dict[str, Any], is_refused: bool
) -> None:
    steps = [{"name": f"s{n}", "prompt": "p", "verifier": verifier} for n, verifier in enumerate(verifiers)]
    task = Task.model_validate({"name": "t", "prompt": "p", "steps": steps})
    agent = {"mcpServers": [{"name": "time", **server}]}
    spec = {
        "mode": "Eval",
        "tasks": {"stream": {}},
        "agent": agent,
        "output": {"uri": "out"},
        "model": {"function": "m:f"},
    }
    job = RolloutJob.model_validate(
        {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "j"}, "spec": spec}
    )
    refused = pytest.raises(TaskSourceError, match=r"task t: has steps, .* agent.mcpServers time would not answer")
    with refused if is_refused else contextlib.nullcontext():
        await check_tasks(job, [task], EnvironmentPool())
