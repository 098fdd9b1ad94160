"""An agent's time is charged with what it used itself, and each lost second is given back once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.agent_clock import AgentClock, union

MOMENTS = st.integers(0, 60)
SPANS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda span: (min(span), max(span))), max_size=12)


@given(SPANS)
def test_time_that_several_calls_lost_at_once_is_given_back_once(spans: list[tuple[int, int]]) -> None:
    lost = {second for begin, end in spans for second in range(begin, end)}
    clock = AgentClock(started=0, used_before=7)
    for begin, end in spans:
        clock.excuse(begin, end)
    assert clock.used(60) == 7 + 60 - len(lost)
    joined = union(spans)
    assert all(end < later for (_, end), (later, _) in pairwise(joined))


@given(SPANS)
def test_what_still_keeps_it_waiting_counts_as_little_as_what_did(spans: list[tuple[int, int]]) -> None:
    over, under_way = AgentClock(started=0), AgentClock(started=0)
    for number, (begin, _) in enumerate(spans):
        over.excuse(begin, 60)
        under_way.wait(number, begin)
    assert over.used(60) == under_way.used(60)
    for number in range(len(spans)):
        under_way.go_on(number, 60)
    assert over.used(75) == under_way.used(75)


def test_a_wait_that_ends_twice_or_never_began_changes_nothing() -> None:
    clock = AgentClock(started=10)
    clock.go_on("call", 12)
    clock.wait("call", 12)
    clock.wait("call", 13)
    clock.go_on("call", 14)
    clock.go_on("call", 20)
    assert clock.used(20) == 8
