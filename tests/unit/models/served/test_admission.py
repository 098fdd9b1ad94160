from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.pool.server import (
    FEWEST_CALLS,
    GROW_BELOW,
    HALVE_ABOVE,
    INCREASE_CALLS,
    INITIAL_CALLS,
    TRIM_ABOVE,
    Pressure,
    next_limit,
    refused_limit,
)

usages = st.floats(0, 1)
readings = st.builds(Pressure, usages, st.integers(0, 1000))


@given(st.floats(1, 1000), st.integers(0, 1000), readings)
def test_a_limit_grows_by_a_step_at_the_most_and_never_stops_all_calls(
    limit: float, calls: int, read: Pressure
) -> None:
    after = next_limit(limit, calls, read)
    assert FEWEST_CALLS <= after <= limit + INCREASE_CALLS
    assert FEWEST_CALLS <= refused_limit(limit, calls) <= max(limit, FEWEST_CALLS)


@given(st.floats(1, 1000), usages.filter(lambda usage: usage > TRIM_ABOVE))
def test_full_cache_lowers_the_limit_once_each_time(limit: float, usage: float) -> None:
    calls = int(limit)
    lowered = next_limit(limit, calls, Pressure(usage, 0))
    assert lowered < limit or lowered == FEWEST_CALLS
    assert calls <= lowered or next_limit(lowered, calls, Pressure(usage, 0)) == lowered


def test_limit_grows_only_when_it_is_reached_and_nobody_waits() -> None:
    assert next_limit(40, 10, Pressure(0.1, 0)) == 40
    assert next_limit(40, 40, Pressure(0.1, 3)) == 40
    assert next_limit(40, 40, Pressure(GROW_BELOW + 0.1, 0)) == 40
    assert next_limit(40, 40, Pressure(0.1, 0)) == 48


def test_several_runners_together_find_the_limit_of_a_server() -> None:
    """A server whose cache is full at 300 calls, and three runners with more calls than it can take."""
    limits = [INITIAL_CALLS * 1, INITIAL_CALLS * 4, INITIAL_CALLS * 8]
    usages = []
    for _ in range(200):
        usage = sum(limits) / 300
        usages.append(usage)
        limits = [next_limit(limit, int(limit), Pressure(min(usage, 1), max(0, usage - 1) * 300)) for limit in limits]
    settled = usages[50:]
    assert max(settled) < HALVE_ABOVE + 0.1
    assert sum(settled) / len(settled) > GROW_BELOW - 0.1
    assert min(limits) >= INITIAL_CALLS / 2, "no runner is starved by the others"
