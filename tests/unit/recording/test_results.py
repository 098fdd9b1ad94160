"""People compare models by these figures: a masked rollout must not change a mean, and all runners write the same
bytes.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime.recording.results import statistics_of, stats_json
from rollout_api.records import Outcome, Result, StopReason

MakeResult = Callable[..., Result]


def test_masked_rollouts_stand_outside_of_every_mean(make_result: MakeResult) -> None:
    masked: dict[str, Any] = {"reward": None, "passed": None, "stop_reason": None}
    results = [
        make_result(0, reward=1.0),
        make_result(1, reward=0.0, passed=False, stop_reason=StopReason.MAX_TURNS),
        make_result(2, outcome=Outcome.INFRA_FAILED, reason="NodeLost", **masked),
        make_result(3, reward=0.5, passed=False),
        make_result(4, outcome=Outcome.CANCELLED, reason="GroupComplete", **masked),
    ]
    stats = statistics_of(results)
    assert stats["outcomes"] == {"Cancelled": 1, "Completed": 3, "InfraFailed": 1}
    assert stats["stopReasons"] == {"Finished": 2, "MaxTurns": 1}
    assert stats["failureReasons"] == {"GroupComplete": 1, "NodeLost": 1}
    assert stats["reward"] == {
        "count": 3, "mean": 0.5, "std": pytest.approx(0.5), "standardError": pytest.approx(0.0), "min": 0.0, "max": 1.0
    }  # fmt: skip
    # The second group has one graded rollout.
    assert stats["passAtK"] == {"1": pytest.approx((0.5 + 0) / 2), "2": pytest.approx(1.0)}


def test_pass_at_k_ends_at_the_size_of_the_smallest_group(make_result: MakeResult) -> None:
    results = [make_result(index, group=index // 4, passed=index % 4 == 0) for index in range(8)]
    assert statistics_of(results)["passAtK"] == {"1": 0.25, "2": 0.5, "4": 1.0}


def test_a_run_without_any_reward_has_statistics_too() -> None:
    nothing = {"count": 0, "mean": None, "std": None, "standardError": None, "min": None, "max": None}
    assert statistics_of([])["reward"] == nothing


def test_every_runner_writes_the_same_results(make_result: MakeResult) -> None:
    results = [make_result(i, reward=i / 7, seconds={"total": i * 0.1, "agent": 1 / (i + 1)}) for i in range(40)]
    shuffled = random.Random(0).sample(results, len(results))
    assert stats_json(statistics_of(shuffled)) == stats_json(statistics_of(results))
