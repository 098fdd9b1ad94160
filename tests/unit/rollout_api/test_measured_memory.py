"""Memory requests by measured use: bounds, and what forged reports can do."""

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_api.base import quantity_value
from rollout_api.measured_memory import LEAST_SECONDS, Measured, declared_spec, request_of, set_request, stepped
from rollout_api.on_cluster.sandbox_pod import needs_of
from rollout_api.sandbox import Resources

MI = 1 << 20
GI = 1 << 30
PLACES = st.integers(1, 1024)
REPORTED = st.floats(0, allow_infinity=False)
REPORTS = st.builds(Measured, seconds=REPORTED, byte_seconds=REPORTED, square_seconds=REPORTED)
LIMITS = st.integers(1, 1 << 40)


def used(mean: float, deviation: float = 0.0, seconds: float = 1000.0) -> Measured:
    return Measured(seconds=seconds, byte_seconds=mean * seconds, square_seconds=(mean**2 + deviation**2) * seconds)


USES = st.builds(used, st.floats(0, 2.0**36), st.floats(0, 2.0**36), st.floats(600, 1e9))


def request(measured: Measured, memory: float, places: int) -> int:
    found = request_of(measured, memory, places)
    assert found is not None
    return found


def test_request_is_mean_and_99th_percentile_of_the_sum_with_a_margin() -> None:
    assert request_of(used(80 * MI), GI, 16) == 144 * MI
    assert request_of(used(80 * MI, 160 * MI), GI, 16) == 312 * MI  # (80 + 2.33 × 160 / 4) × 1.8
    assert request_of(used(80 * MI, 160 * MI), GI, 64) == 228 * MI
    assert request_of(used(0), GI, 16) == 16 * MI
    assert request_of(used(900 * MI), GI, 16) == GI
    assert request_of(used(MI), 1_000_000, 16) == 1_000_000


def test_request_is_unknown_until_enough_was_measured() -> None:
    assert request_of(used(80 * MI, seconds=599), GI, 16) is None
    assert request_of(used(80 * MI, seconds=600), GI, 16) is not None


@given(REPORTS, LIMITS, PLACES)
def test_request_is_between_its_bounds_whatever_was_reported(measured: Measured, memory: int, places: int) -> None:
    for each in (measured, measured.believed(memory, 1e9), measured + measured):
        found = request_of(each, memory, places)
        assert found is None or min(16 * MI, memory) <= found <= memory
        assert found is None or found == memory or found % MI == 0


@given(USES, st.floats(0, 2.0**36), LIMITS, PLACES)
def test_request_grows_with_mean_and_variance_and_falls_with_places(
    measured: Measured, more: float, memory: int, places: int
) -> None:
    base, seconds = request(measured, memory, places), measured.seconds
    mean = measured.byte_seconds / seconds
    shifted = Measured(
        seconds=seconds,
        byte_seconds=measured.byte_seconds + more * seconds,
        square_seconds=measured.square_seconds + (2 * mean * more + more**2) * seconds,
    )
    spread = measured + Measured(square_seconds=more**2 * seconds)
    # Rounding may lift or lower the result by its step.
    assert request(shifted, memory, places) >= base - MI
    assert request(spread, memory, places) >= base
    assert request(measured, memory, places + 1) <= base
    assert request(measured, memory + MI, places) >= base


@given(REPORTS, REPORTS, REPORTS)
def test_adding_is_associative_and_commutative(one: Measured, two: Measured, three: Measured) -> None:
    assert one + two == two + one
    left, right = (one + two) + three, one + (two + three)
    for name in Measured.model_fields:
        assert math.isclose(getattr(left, name), getattr(right, name), rel_tol=1e-12)
    assert one + Measured() == one


@pytest.mark.parametrize(
    "forged", [{"seconds": -1}, {"byteSeconds": math.nan}, {"squareSeconds": math.inf}, {"more": 1}]
)
def test_values_that_cannot_be_measured_are_rejected(forged: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Measured.model_validate(forged)


@pytest.mark.parametrize(
    "forged",
    [
        used(2 * GI),  # more than the limit
        Measured(seconds=1000, byte_seconds=1000 * MI, square_seconds=0.9 * 1000 * MI**2),  # a negative variance
        used(MI, 100 * GI),  # a variance that needs more than the limit
        Measured(byte_seconds=1000),
        Measured(seconds=1000, square_seconds=1000),
    ],
)
def test_impossible_use_does_not_count(forged: Measured) -> None:
    assert forged.believed(GI, 1e6) == Measured()


@given(st.lists(st.tuples(st.integers(0, GI), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_use_within_the_limit_counts(held: list[tuple[int, int]]) -> None:
    measured = sum((used(size, seconds=seconds) for size, seconds in held), Measured())
    assert measured.believed(GI, math.inf) == measured


@given(USES, st.floats(0, 1e6))
def test_report_counts_for_no_more_time_than_its_sandbox_had(measured: Measured, most: float) -> None:
    believed = measured.believed(1 << 60, most)
    assert believed.seconds <= most * (1 + 1e-9)
    assume(believed.seconds >= LEAST_SECONDS)
    assert abs(request(believed, 1 << 60, 4) - request(measured, 1 << 60, 4)) <= MI


def test_request_changes_by_steps_alone() -> None:
    assert stepped(None, None) is None
    assert stepped(None, 100) == 100
    assert stepped(100, None) == 100
    assert [stepped(100, fresh) for fresh in (91, 109, 90, 110)] == [100, 100, 90, 110]


def test_measured_request_is_undone_by_the_annotation_that_it_leaves() -> None:
    resources = {"memory": "1Gi", "memoryRequest": "Measured"}
    sandbox: dict[str, Any] = {"metadata": {"name": "a"}, "spec": {"image": "debian", "resources": resources}}
    before = {"image": "debian", "resources": dict(resources)}
    set_request(sandbox, None)
    assert declared_spec(sandbox) == sandbox["spec"] == before
    set_request(sandbox, 217 * MI)
    assert sandbox["spec"]["resources"] == {"memory": "1Gi", "memoryRequest": "217Mi"}
    assert declared_spec(sandbox) == before
    assert declared_spec({"metadata": {}}) == {}


def test_measured_request_is_the_limit_until_something_is_known() -> None:
    resources = Resources(memory="1Gi", memory_request="Measured")
    assert needs_of(resources, 4).memory_bytes == 4 * GI
    assert resources.measured_limit == quantity_value("1Gi")
    assert Resources(memory="1Gi", memory_request="2Mi").measured_limit is None
    with pytest.raises(ValidationError, match="memoryRequest needs memory"):
        Resources(memory_request="Measured")
    with pytest.raises(ValidationError, match="should match pattern"):
        Resources(memory="1Gi", memory_request="measured")
