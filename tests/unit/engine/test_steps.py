"""What a task in steps is worth."""

import time

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.steps import missed_gate, traces, verdict_of_steps
from rollout_api.records import StepRecord, Verdict
from rollout_api.tasks import Task, TaskStep

VERIFIER = {"kind": "rewardFile", "commands": ["true"], "files": [{"path": "/tests/a", "content": ""}]}
REWARDS = st.lists(st.floats(-1, 1), min_size=1, max_size=6)


def task(count: int, how: str = "Mean") -> Task:
    steps = [{"name": f"s{n}", "prompt": "p", "verifier": VERIFIER} for n in range(count)]
    return Task.model_validate({"name": "t", "prompt": "p", "steps": steps, "stepReward": how})


def taken(rewards: list[float]) -> list[StepRecord]:
    return [
        StepRecord(time=time.time(), step=f"s{n}", ended=True, verdict=Verdict(reward=reward, passed=reward == 1))
        for n, reward in enumerate(rewards)
    ]


@given(REWARDS, st.integers(0, 5))
def test_ending_early_never_pays(rewards: list[float], more: int) -> None:
    """Whoever goes on to steps that are worth at least 0 gets at least as much as whoever uses up a limit before them."""
    for how in ("Mean", "Final"):
        whole = task(len(rewards) + more, how)
        early = verdict_of_steps(whole, taken(rewards), cut_short=True)
        late = verdict_of_steps(whole, taken([*rewards, *[0.0] * more]), cut_short=False)
        assert early is not None
        assert late is not None
        assert early.reward <= late.reward + 1e-9 or (more == 0 and early.reward == late.reward)
        assert early.forgeable


@given(REWARDS)
def test_mean_and_final_are_what_harbor_makes_of_them(rewards: list[float]) -> None:
    mean = verdict_of_steps(task(len(rewards)), taken(rewards), cut_short=False)
    final = verdict_of_steps(task(len(rewards), "Final"), taken(rewards), cut_short=False)
    assert mean is not None
    assert final is not None
    assert abs(mean.reward - sum(rewards) / len(rewards)) < 1e-9
    assert final.reward == rewards[-1]
    assert mean.passed == all(reward == 1 for reward in rewards)


def test_steps_behind_a_missed_gate_are_left_out_of_the_mean() -> None:
    verdict = verdict_of_steps(task(3), taken([0.5]), cut_short=False)
    assert verdict is not None
    assert (verdict.reward, verdict.passed) == (0.5, False)


def test_a_reward_that_was_not_given_misses_its_gate() -> None:
    step = TaskStep.model_validate({"name": "s", "prompt": "p", "minRewards": {"reward": 0.5, "style": 0}})
    assert missed_gate(step, None) == "reward is not given, below minRewards 0.5"
    assert missed_gate(step, Verdict(reward=0.5, passed=False)) == "style is not given, below minRewards 0"
    assert missed_gate(step, Verdict(reward=0.5, rewards={"style": 0.0}, passed=False)) is None


def test_the_next_step_finds_no_tests_and_no_reward() -> None:
    files = [{"path": path, "content": ""} for path in ("/tests/x/a.py", "hidden.txt")]
    verifier = {"kind": "rewardFile", "commands": ["true"], "files": files}
    graded = Task.model_validate({"name": "t", "prompt": "p", "verifier": verifier})
    assert traces(graded) == ["/tests", "/logs/verifier", "hidden.txt"]
