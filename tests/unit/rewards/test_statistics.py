"""Every number that a user sees is computed in one way; what is undefined is None, not 0."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.statistics import mean, paired_difference, pass_at_k, sample_std, standard_error

rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_probability_that_one_of_k_drawn_rollouts_passed(graded: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, graded)), data.draw(st.integers(1, graded))
    draws = list(itertools.combinations([True] * passed + [False] * (graded - passed), k))
    assert pass_at_k(graded, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_statistics_are_undefined_for_too_few_values() -> None:
    assert (mean([]), sample_std([]), sample_std([1.0]), standard_error([]), standard_error([[1.0, 0.0]])) == (
        None,
    ) * 5


@given(rewards.filter(lambda values: len(values) > 1))
def test_standard_error_of_independent_rewards_is_their_deviation_over_root_n(values: list[float]) -> None:
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert standard_error([[value] for value in values]) == pytest.approx(expected)
    assert sample_std(values) == pytest.approx(statistics.stdev(values))


@given(rewards.filter(lambda values: len(values) > 1), st.integers(2, 5))
def test_standard_error_does_not_shrink_when_each_reward_is_counted_again(values: list[float], times: int) -> None:
    once = standard_error([[value] for value in values])
    assert standard_error([[value] * times for value in values]) == pytest.approx(once)
    assert standard_error([[], *([value] for value in values)]) == once


def test_difference_of_two_runs_is_paired_by_task() -> None:
    found = paired_difference([([0, 1], [1]), ([0, 0], [0.5, 0.5]), ([1, 1], [1])])
    assert found is not None
    assert [found.before, found.after] == pytest.approx([0.5, 5 / 6])
    assert found.mean == pytest.approx(1 / 3)
    assert found.standard_error == pytest.approx(1 / 6)  # changes 0.5, 0.5, 0: deviation 0.2887 over the root of 3
    assert found.interval is not None
    assert list(found.interval) == pytest.approx([1 / 3 - 1.96 / 6, 1 / 3 + 1.96 / 6])
    assert paired_difference([]) is None
    one = paired_difference([([0], [1])])
    assert one is not None
    assert one.interval is None
