import pytest

from agent_runtime.statistics import scalars
from rollout_api.records import Outcome, Result


def result(index: int, reward: float | None, tag: str, **fields: object) -> Result:
    outcome = Outcome.INFRA_FAILED if reward is None else Outcome.COMPLETED
    return Result.model_validate(
        {
            "index": index,
            "group": 0,
            "member": index,
            "task": "t",
            "tags": [tag],
            "mode": "Train",
            "seed": 0,
            "outcome": outcome,
            "reward": reward,
            "attempt": 0,
            **fields,
        }
    )


def test_scalars_are_means_by_environment_and_lost_rollouts_only_a_share() -> None:
    shown = scalars(
        [
            result(0, 1.0, "lake", turns=4, passed=True, rewards={"success": 1.0}, seconds={"total": 2.0}),
            result(1, 0.0, "boxes", turns=8, passed=False, rewards={"success": 0.0}),
            result(2, None, "boxes", turns=99),
        ]
    )
    assert shown["masked"] == pytest.approx(1 / 3)
    assert (shown["rollout/reward"], shown["rollout/turns"], shown["rollout/success"]) == (0.5, 6, 0.5)
    assert (shown["env/lake/reward"], shown["env/boxes/reward"], shown["env/lake/seconds"]) == (1.0, 0.0, 2.0)
    assert shown["rollout/reward_std"] == pytest.approx(0.5**0.5)


def test_reward_curve_is_not_replaced_by_a_named_reward() -> None:
    shown = scalars([result(0, 0.0, "lake", passed=False, rewards={"reward": 0.9, "passed": 1.0})])
    assert (shown["rollout/reward"], shown["rollout/passed"]) == (0.0, 0.0)


def test_a_group_that_was_lost_as_a_whole_has_no_mean() -> None:
    assert scalars([result(0, None, "lake")]) == {"rollouts": 1.0, "masked": 1.0}
    assert scalars([]) == {"rollouts": 0.0}
