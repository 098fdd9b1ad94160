"""The conditions that failed actions add to a status."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from rollout_api.on_cluster.objects import Manifest
from rollout_operator.api import ApiError
from rollout_operator.conditions import condition, with_timestamps
from rollout_operator.execute import with_failures

NOW = datetime(2026, 1, 1, tzinfo=UTC)
READY = with_timestamps(condition("Ready", False, "Starting", "it starts"), None, NOW, 1).wire()
failures = st.lists(st.sampled_from([403, 422, 429, 500, 503]).map(lambda status: ApiError(status, "no")), max_size=2)


@given(st.lists(st.tuples(st.booleans(), failures), max_size=6))
def test_a_status_has_each_condition_once_whatever_fails_when(rounds: list[tuple[bool, list[ApiError]]]) -> None:
    """The API server refuses a status with two conditions of a type."""
    found: Manifest = {}
    for has_ready, failures in rounds:
        found = with_failures({"conditions": [READY] if has_ready else []}, found, failures, 1, NOW)
        types = [entry["type"] for entry in found["conditions"]]
        assert len(types) == len(set(types)), types
