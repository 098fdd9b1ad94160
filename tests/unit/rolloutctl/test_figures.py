"""Means and pass rates leave out masked rollouts, and do not exist without graded ones."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.records import Outcome, Result, StopReason
from rolloutctl.commands.results import print_results
from rolloutctl.ui.figures import group_figures


def result(index: int, reward: float | None, outcome: Outcome = Outcome.COMPLETED, size: int = 4) -> Result:
    return Result(
        index=index,
        group=index // size,
        member=index % size,
        task=f"task-{index // size}",
        mode="Train",
        seed=0,
        outcome=outcome,
        stop_reason=StopReason.FINISHED if outcome is Outcome.COMPLETED else None,
        reward=reward,
        passed=None if reward is None else reward == 1,
        attempt=1,
    )


def test_masked_rollouts_count_for_no_mean() -> None:
    (group,) = group_figures(
        [result(0, 1.0), result(1, 0.0), result(2, None, Outcome.INFRA_FAILED), result(3, None, Outcome.CANCELLED)], k=4
    )
    assert (group.graded, group.mean, group.std, group.pass_at_1) == (2, 0.5, 0.5**0.5, 0.5)
    assert group.pass_at_k is None, "pass@4 of two graded rollouts is not known"
    assert group.outcomes == {"Finished": 2, "InfraFailed": 1, "Cancelled": 1}


def test_a_group_without_a_verifier_has_no_mean() -> None:
    (group,) = group_figures([result(0, None), result(1, None)], k=2)
    assert (group.mean, group.std, group.pass_at_1, group.pass_at_k) == (None, None, None, None)


def test_worst_group_is_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_results("run", [result(index, index // 4 / 2) for index in (4, 8, 0)], total=3, group_size=1)
    assert re.findall("task-[0-9]", capsys.readouterr().out) == ["task-0", "task-1", "task-2"]


rewards = st.lists(st.none() | st.sampled_from([0.0, 0.25, 1.0]), max_size=40)


@given(rewards)
def test_every_rollout_is_in_exactly_one_group_and_the_means_are_consistent(values: list[float | None]) -> None:
    results = [result(index, value) for index, value in enumerate(values)]
    groups = group_figures(results, k=4)
    assert sum(sum(group.outcomes.values()) for group in groups) == len(values)
    assert sum(group.graded for group in groups) == sum(value is not None for value in values)
    for group in groups:
        if group.pass_at_k is not None:
            assert group.pass_at_1 is not None
            assert group.pass_at_k == (1.0 if group.pass_at_1 > 0 else 0.0), "k of k: at least one passed"
