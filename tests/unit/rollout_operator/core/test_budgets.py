"""Budgets: the rate holds over every stretch of time, and nobody waits for ever or loses a place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.budgets import Budget, TokenBucket


@given(
    rate=st.floats(0.5, 100),
    pauses=st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_no_stretch_of_time_gets_more_than_its_rate_and_one_second_of_burst(rate: float, pauses: list[float]) -> None:
    bucket, now, granted = TokenBucket(rate), 0.0, []
    for pause in pauses:
        now += pause
        at = bucket.promise(now)
        assert at >= now
        granted.append(at)
    assert granted == sorted(granted)
    for first in range(len(granted)):
        for last in range(first, len(granted)):
            stretch = granted[last] - granted[first]
            assert last - first + 1 <= stretch * rate + max(1.0, rate) + 1 + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 0.5)), max_size=80))
def test_a_key_that_comes_back_keeps_its_place(visits: list[tuple[str, float]]) -> None:
    budget: Budget[str] = Budget(per_second=2, in_flight=1)
    now, due = 0.0, dict[str, float]()
    for key, pause in visits:
        now += pause
        wait = budget.admit(key, now)
        if key in due:
            assert wait == pytest.approx(max(0.0, due[key] - now), abs=1e-9)
        if wait:
            due[key] = now + wait
        else:
            due.pop(key, None)


def test_a_steady_flow_below_the_rate_never_waits() -> None:
    budget: Budget[int] = Budget(per_second=10, in_flight=1)
    assert all(budget.admit(turn, turn * 0.11) == 0 for turn in range(200))


def test_creates_that_wait_do_not_delay_deletes() -> None:
    creates: Budget[str] = Budget(per_second=1, in_flight=1)
    deletes: Budget[str] = Budget(per_second=1, in_flight=1)
    waits = [creates.admit(f"pod-{number}", 0) for number in range(100)]
    assert max(waits) > 90
    assert deletes.admit("pod-0", 0) == 0
