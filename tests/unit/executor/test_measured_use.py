"""Sums from which the mean and the variance of workspaces' memory follow."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.overlay.sandbox_memory import MeasuredUse


def test_measured_use_counts_what_groups_hold_from_their_first_use_to_their_end() -> None:
    use = MeasuredUse(100.0)
    assert use.sums(110.0) == {"seconds": 0.0, "byteSeconds": 0.0, "squareSeconds": 0.0}
    use.hold(1, 0, 110.0)
    use.hold(1, 5, 112.0)
    use.hold(2, 3, 114.0)
    assert use.sums(115.0) == {"seconds": 6.0, "byteSeconds": 18.0, "squareSeconds": 84.0}
    use.hold(1, None, 115.0)
    use.hold(1, None, 116.0)
    assert use.sums(118.0) == {"seconds": 9.0, "byteSeconds": 27.0, "squareSeconds": 111.0}


@given(st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(0, 2**34)), min_size=1, max_size=40))
def test_measured_use_gives_mean_and_variance_of_what_was_held(steps: list[tuple[int, int | None]]) -> None:
    use = MeasuredUse(0.0)
    held: dict[int, int] = {}
    samples: list[int] = []
    for now, (group, used) in enumerate(steps):
        use.hold(group, used, float(now))
        held.pop(group, None)
        if used is not None:
            held[group] = used
        samples += held.values()
    sums = use.sums(float(len(steps)))
    assert sums["seconds"] == len(samples)
    if samples:
        mean = sums["byteSeconds"] / sums["seconds"]
        assert mean == pytest.approx(statistics.fmean(samples))
        scale = max(samples) ** 2
        variance = sums["squareSeconds"] / sums["seconds"] - mean**2
        assert variance == pytest.approx(statistics.pvariance(samples), abs=1e-9 * scale)
