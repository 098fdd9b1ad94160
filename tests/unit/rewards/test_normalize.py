import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.statistics import HIGHEST, LOWEST, advantages, normalized, with_advantages
from rollout_api.records import Outcome, Result
from rollout_api.rewards import GroupBy, NormalizationMethod, RewardNormalization

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=16)
METHODS = st.sampled_from(NormalizationMethod)


def result(index: int, reward: float | None, *, group: int = 0, tag: str = "a", batch: str | None = None) -> Result:
    outcome = Outcome.COMPLETED if reward is not None else Outcome.INFRA_FAILED
    return Result(
        index=index,
        group=group,
        member=0,
        task="t",
        tags=[tag],
        mode="Train",
        seed=0,
        outcome=outcome,
        reward=reward,
        attempt=0,
        batch=batch,
    )


# Computed with ROLL's own `agentic_reward_norm` arithmetic: (x - mean) / (sample std + 1e-6), zeros where std is 0.
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (NormalizationMethod.IDENTITY, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        (NormalizationMethod.MEAN, [-1 / 13] * 12 + [12 / 13]),
        (NormalizationMethod.MEAN_STD, [-0.2773490867] * 12 + [3.3281890408]),
        (NormalizationMethod.ASYM_CLIP, [-0.2773490867] * 12 + [3.0]),
    ],
)
def test_a_trainer_gets_the_advantages_that_roll_would_give_it(
    method: NormalizationMethod, expected: list[float]
) -> None:
    assert normalized([0.0] * 12 + [1.0], method) == pytest.approx(expected, abs=1e-6)


@given(REWARDS, METHODS)
def test_equal_or_single_rewards_are_normalized_to_zero(rewards: list[float], method: NormalizationMethod) -> None:
    same = normalized([rewards[0]] * len(rewards), method)
    wanted = rewards[0] if method is NormalizationMethod.IDENTITY else 0.0
    assert same == pytest.approx([wanted] * len(rewards), abs=1e-9)


@given(REWARDS)
def test_normalised_rewards_have_mean_zero_and_deviation_one(rewards: list[float]) -> None:
    values = normalized(rewards, NormalizationMethod.MEAN_STD)
    assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    if len(rewards) > 1 and statistics.stdev(rewards) > 0.01:
        assert statistics.stdev(values) == pytest.approx(1, rel=1e-3)


@given(REWARDS, METHODS, st.floats(0.1, 5))
def test_advantages_are_within_their_bounds_and_in_the_order_of_rewards(
    rewards: list[float], method: NormalizationMethod, clip: float
) -> None:
    values = normalized(rewards, method, clip)
    lowest, highest = (
        (max(-clip, LOWEST), min(clip, HIGHEST)) if method is NormalizationMethod.ASYM_CLIP else (-clip, clip)
    )
    assert all(lowest <= value <= highest for value in values)
    ranked = sorted(zip(rewards, values, strict=True))
    assert [value for _, value in ranked] == sorted(values)


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=12), METHODS, st.sampled_from(GroupBy))
def test_lost_rollout_changes_no_other_advantage(
    rewards: list[float | None], method: NormalizationMethod, group_by: GroupBy
) -> None:
    spec = RewardNormalization(group_by=group_by, method=method)
    everyone = [result(index, reward) for index, reward in enumerate(rewards)]
    survivors = [one for one in everyone if one.reward is not None]
    assert advantages(everyone, spec) == advantages(survivors, spec)
    assert [one.advantage is None for one in with_advantages(everyone, spec)] == [r is None for r in rewards]


def test_rewards_are_normalized_within_the_chosen_groups() -> None:
    results = [
        result(0, 1.0, group=0, tag="a", batch="1"),
        result(1, 3.0, group=0, tag="a", batch="1"),
        result(2, 5.0, group=1, tag="b", batch="1"),
        result(3, 7.0, group=2, tag="a", batch="2"),
    ]

    def mean(group_by: GroupBy) -> dict[int, float]:
        return advantages(results, RewardNormalization(group_by=group_by, method=NormalizationMethod.MEAN))

    assert mean(GroupBy.GROUP) == {0: -1.0, 1: 1.0, 2: 0.0, 3: 0.0}
    assert mean(GroupBy.TAG) == {0: -1.0, 1: 1.0, 2: 0.0, 3: 0.0}
    assert mean(GroupBy.BATCH) == {0: -2.0, 1: 0.0, 2: 2.0, 3: 0.0}


def test_advantage_is_absent_without_a_rule() -> None:
    assert next(with_advantages([result(0, 1.0)], None)).advantage is None
