"""Counts in the status add up, whatever moment each runner's report describes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_api.records import Outcome
from rollout_api.rollout_job import RolloutJobStatus, RunnerReport
from rollout_operator.rollout_job.status import add_up

counts = st.integers(0, 10**6)
reports = st.lists(
    st.builds(
        RunnerReport,
        index=st.integers(0, 255),
        total=st.none() | counts,
        sealed=counts,
        running=counts,
        outcomes=st.dictionaries(st.sampled_from(["Completed", "InfraFailed", "Cancelled"]), counts),
        reward_sum=st.floats(allow_nan=False, allow_infinity=False),
        rewarded=counts,
    ),
    max_size=8,
    unique_by=lambda report: report.index,
)


def report(index: int, **changes: object) -> RunnerReport:
    return RunnerReport.model_validate({"index": index, **changes})


@given(reports, st.integers(1, 8), st.none() | counts)
def test_no_count_ever_exceeds_the_total(found: list[RunnerReport], replicas: int, listed: int | None) -> None:
    sums = add_up(found, replicas, listed)
    RolloutJobStatus(total=sums.total, sealed=sums.sealed, outcomes=sums.outcomes, mean_reward=sums.mean_reward)
    if sums.total is not None:
        assert max(sums.sealed, sum(sums.outcomes.values())) <= sums.total


def test_sums_of_the_largest_reports_fit_into_64_bits() -> None:
    with pytest.raises(ValidationError):
        report(0, sealed=2**63 - 1)
    with pytest.raises(ValidationError):
        report(0, outcomes={"NoOutcome": 1})
    outcomes = dict.fromkeys(Outcome, 10**12)
    sums = add_up([report(index, sealed=10**12, total=10**12, outcomes=outcomes) for index in range(256)], 256, None)
    assert sums.total is not None
    assert sums.total < 2**63


def test_shards_add_up() -> None:
    sums = add_up(
        [
            report(0, total=4, sealed=3, running=1, outcomes={"Completed": 3}, rewardSum=1.5, rewarded=3, tokenForks=2),
            report(1, total=8, sealed=1, running=2, outcomes={"InfraFailed": 1}, tokenForks=1),
        ],
        2,
        None,
    )
    assert (sums.total, sums.sealed, sums.running) == (12, 4, 3)
    assert sums.outcomes == {"Completed": 3, "InfraFailed": 1}
    assert sums.mean_reward == pytest.approx(0.5), "rollouts without a reward are outside the mean"
    assert sums.token_forks == 3
    assert str(sums) == "4 of 12 rollouts sealed, 3 running"


def test_total_is_known_from_the_manifest_before_the_first_runner_starts() -> None:
    assert add_up([], 1, 8).total == 8


def test_total_of_a_stream_is_unknown_until_every_runner_reports_one() -> None:
    assert add_up([report(0, total=4), report(1, sealed=2)], 2, None).total is None
    assert add_up([report(0, total=4), report(1, total=6)], 2, None).total == 10
