"""Budgets: the rate holds over every interval, and no writer waits forever or loses its place."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.budgets import LONGEST_WAIT_SECONDS, Budget, TokenBucket


@given(rate=st.floats(0.5, 100), pauses=st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_stretch_of_time_gets_more_than_its_rate_and_one_second_of_burst(rate: float, pauses: list[float]) -> None:
    bucket, now, granted = TokenBucket(rate), 0.0, []
    for pause in pauses:
        now += pause
        at = bucket.reserve(now)
        assert at >= now
        granted.append(at)
    assert granted == sorted(granted)
    for first in range(len(granted)):
        for last in range(first, len(granted)):
            stretch = granted[last] - granted[first]
            assert last - first + 1 <= stretch * rate + max(1.0, rate) + 1 + 1e-6


Key = tuple[str, int]


def written(arrivals: list[tuple[float, Key]], rate: float) -> dict[Key, float]:
    """Return when each key may write if it comes back whenever it is told to. A key is its group and a number."""
    budget: Budget[Key] = Budget(rate, 1, group_of=lambda key: key[0])
    visits, done = list(arrivals), dict[Key, float]()
    heapq.heapify(visits)
    while visits:
        now, key = heapq.heappop(visits)
        if wait := budget.admit(key, now):
            heapq.heappush(visits, (now + wait, key))
        else:
            done[key] = now
    return done


@given(
    rate=st.floats(0.5, 100),
    arrivals=st.lists(st.tuples(st.floats(0, 5), st.sampled_from("abc")), min_size=1, max_size=60),
)
def test_retrying_writer_succeeds_in_the_end(rate: float, arrivals: list[tuple[float, str]]) -> None:
    keys = [(at, (group, number)) for number, (at, group) in enumerate(arrivals)]
    done = written(keys, rate)
    assert done.keys() == {key for _, key in keys}
    assert max(done.values()) <= 5 + 3 * (len(keys) + 1) / rate + LONGEST_WAIT_SECONDS


def test_a_tenant_of_ten_thousand_sandboxes_does_not_delay_another() -> None:
    many = [(0.0, ("large", number)) for number in range(10_000)]
    few = [(1.0, ("small", number)) for number in range(5)]
    done = written(many + few, rate=50)
    assert max(done[key] for _, key in few) <= 1.0 + (5 * 2 + 1) / 50
    assert max(done.values()) <= 10_005 / 50 + LONGEST_WAIT_SECONDS


def test_removed_key_uses_no_place() -> None:
    budget: Budget[str] = Budget(per_second=1, in_flight=1)
    assert [budget.admit(key, 0.0) for key in "abc"] == [0.0, 1.0, 2.0]
    budget.forget("b")
    assert budget.admit("c", 1.0) == 0.0


def test_a_steady_flow_below_the_rate_never_waits() -> None:
    budget: Budget[int] = Budget(per_second=10, in_flight=1)
    assert all(budget.admit(turn, turn * 0.11) == 0 for turn in range(200))


def test_creates_that_wait_do_not_delay_deletes() -> None:
    creates: Budget[str] = Budget(per_second=1, in_flight=1)
    deletes: Budget[str] = Budget(per_second=1, in_flight=1)
    waits = [creates.admit(f"pod-{number}", 0) for number in range(100)]
    assert max(waits) > 50
    assert deletes.admit("pod-0", 0) == 0
