"""The moments from which deadlines are counted."""

from datetime import timedelta

from rollout_operator.conditions import condition
from rollout_operator.sandbox.plan import KEPT_AFTER_FINISHED
from rollout_operator.sandbox.status import merged
from rollout_operator.sandbox.steps import MISSED_AFTER, seconds_left
from tests.unit.rollout_operator.sandbox.objects import NOW


def test_start_deadline_counts_from_the_creation() -> None:
    assert seconds_left(NOW, timedelta(seconds=600), NOW + timedelta(seconds=100)) == 500
    assert seconds_left(NOW, timedelta(seconds=600), NOW + timedelta(seconds=601)) == -1


def test_a_sandbox_that_has_ended_can_be_read_for_a_minute() -> None:
    assert seconds_left(NOW, KEPT_AFTER_FINISHED, NOW + timedelta(seconds=59)) == 1
    assert seconds_left(NOW, KEPT_AFTER_FINISHED, NOW + timedelta(seconds=60)) == 0


def test_missing_pod_counts_as_deleted_only_after_some_seconds() -> None:
    (ready,) = merged([], [condition("Ready", True, "Running")], NOW, 1)
    assert seconds_left(ready.last_transition_time, MISSED_AFTER, NOW) > 0
    assert seconds_left(ready.last_transition_time, MISSED_AFTER, NOW + timedelta(seconds=5)) <= 0
