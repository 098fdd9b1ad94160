"""A job without progress is given up, and one with progress, however slow, never is."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_api.rollout_job import Restarts
from rollout_operator.rollout_job.verdict import count_from, failure_limit, failures_since


def restarts(failed_pods: int, sealed: int) -> Restarts:
    return Restarts(failed_pods=failed_pods, sealed=sealed)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50))
def test_a_job_that_makes_progress_is_never_given_up(failures_before_each_seal: list[int]) -> None:
    since, failed = count_from(None, 0, 0, suspended=False), 0
    for sealed, more in enumerate(failures_before_each_seal):
        for _ in range(more):
            failed += 1
            since = count_from(since, failed, sealed, suspended=False)
            assert failures_since(since, failed) < failure_limit(1)
        since = count_from(since, failed, sealed + 1, suspended=False)


def test_ten_failures_in_a_row_are_enough_for_a_few_runners() -> None:
    assert (failure_limit(0), failure_limit(1), failure_limit(3)) == (10, 10, 10)


@given(st.integers(1, 256))
def test_outage_that_ends_all_runners_is_not_a_reason_to_give_up(runners: int) -> None:
    assert runners < 2 * runners < failure_limit(runners)


def test_pods_that_a_suspension_ended_are_not_failures() -> None:
    since = count_from(restarts(0, 5), 64, 5, suspended=True)
    assert failures_since(count_from(since, 64, 5, suspended=False), 64) == 0


def test_a_runner_job_made_anew_counts_from_zero() -> None:
    assert failures_since(count_from(restarts(9, 5), 0, 5, suspended=False), 0) == 0


def test_pods_that_drained_while_no_operator_ran_are_not_failures() -> None:
    since = count_from(restarts(0, 5), 1, 6, suspended=False, drains=1)
    since = count_from(since, 5, 6, suspended=False, drains=5)
    assert failures_since(since, 5, 5) == 0
    assert failures_since(count_from(since, 6, 6, suspended=False, disrupted_pods=4, drains=5), 6, 5) == 1


def test_disrupted_pods_are_not_failures_in_whatever_order_they_are_seen() -> None:
    seen_first = count_from(restarts(3, 5), 3, 5, suspended=False, disrupted_pods=1)
    assert failures_since(seen_first, 3) == 0
    assert failures_since(count_from(seen_first, 4, 5, suspended=False), 4) == 0
    assert failures_since(count_from(seen_first, 5, 5, suspended=False), 5) == 1
