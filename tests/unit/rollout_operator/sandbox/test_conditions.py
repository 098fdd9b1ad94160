"""Conditions change only when something changed."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.conditions import condition, find, holds, timestamp
from rollout_operator.sandbox.status import merged
from rollout_operator.tenant_limits import MOST_CHARACTERS
from tests.unit.rollout_operator.sandbox.objects import NOW

LATER = NOW + timedelta(minutes=1)


def test_problem_with_a_changing_message_is_written_once() -> None:
    old = merged([], [condition("Scheduled", False, "Unschedulable", "0/3 nodes")], NOW, 1)
    assert merged(old, [condition("Scheduled", False, "Unschedulable", "0/4 nodes")], LATER, 1) == old


def test_other_reason_is_written_and_keeps_the_transition_time() -> None:
    old = merged([], [condition("Ready", False, "TrialFailed")], NOW, 1)
    (now,) = merged(old, [condition("Ready", False, "OOMKilled")], LATER, 2)
    assert (now.reason, now.last_transition_time, now.observed_generation) == ("OOMKilled", timestamp(NOW), 2)
    (then,) = merged([now], [condition("Ready", True, "Running")], LATER, 2)
    assert then.last_transition_time == timestamp(LATER)


def test_conditions_are_listed_in_the_order_in_which_they_become_true() -> None:
    new = [condition(kind, True, "R") for kind in ("Finished", "Ready", "Scheduled", "Overlay", "ImagePulled")]
    assert [found.type for found in merged([], new, NOW, 1)] == [
        "Scheduled",
        "ImagePulled",
        "Overlay",
        "Ready",
        "Finished",
    ]


@given(st.text())
def test_any_message_of_a_registry_fits_into_a_status(words: str) -> None:
    assert len(condition("Ready", False, "R", words * 50).message) <= MOST_CHARACTERS


def test_missing_condition_does_not_hold() -> None:
    conditions = [condition("Ready", False, "R")]
    assert not holds(conditions, "Ready")
    assert not holds(conditions, "Finished")
    assert find(conditions, "Finished") is None
