"""A finished job is deleted when its time is over, never earlier, and never if that is switched off."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.rollout_job.plan import seconds_left

ENDED = datetime(2026, 3, 1, tzinfo=UTC)


def test_a_job_is_kept_when_it_runs_or_its_deletion_is_switched_off() -> None:
    assert seconds_left(None, 0, ENDED) is None
    assert seconds_left(ENDED, -1, ENDED + timedelta(days=1000)) is None


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_seconds_left_reach_zero_when_the_ttl_is_over(ttl: int, elapsed: int) -> None:
    left = seconds_left(ENDED, ttl, ENDED + timedelta(seconds=elapsed))
    assert left == max(0, ttl - elapsed)
