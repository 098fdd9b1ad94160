"""What a runner reads from a Sandbox."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.kube.api import owner_uid
from agent_runtime.sandboxes.cluster.sandbox_object import POD_IP, Reason, sandbox_view
from rollout_api.conditions import Condition
from rollout_api.sandbox import SandboxStatus

KINDS = ["Scheduled", "ImagePulled", "Overlay", "Ready", "Finished"]
statuses = st.builds(
    SandboxStatus,
    conditions=st.lists(
        st.builds(
            Condition,
            type=st.sampled_from(KINDS),
            status=st.sampled_from(["True", "False", "Unknown"]),
            reason=st.sampled_from(["Evicted", "Running", "ImagePullBackOff"]),
            message=st.text(max_size=5),
        ),
        unique_by=lambda condition: condition.type,
    ),
    pod_ip=st.none() | st.just("10.0.0.7"),
)


def seen(*conditions: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": holds, "reason": reason, "message": "words"} for kind, holds, reason in conditions
    ]
    return {"metadata": {"name": "one", "uid": "u"}, "spec": {}, "status": {"conditions": listed, **status}}


@given(st.none() | statuses)
def test_every_status_is_parsed_and_only_a_running_pod_is_reachable(status: SandboxStatus | None) -> None:
    wire = {"status": status.wire()} if status is not None else {}
    view = sandbox_view({"metadata": {"name": "one", "uid": "u"}, **wire})
    assert view.pod_ip == (status and status.pod_ip)
    if view.can_be_reached:
        assert view.pod_ip is not None
        assert view.finished is None
        assert view.problem is None


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        ([("Scheduled", "False", "Unschedulable")], "Unschedulable"),
        ([("Scheduled", "True", "Scheduled"), ("ImagePulled", "False", "ImagePullBackOff")], "ImagePullBackOff"),
        ([("Ready", "False", "Pending"), ("ImagePulled", "False", "ErrImagePull")], "ErrImagePull"),
        ([("Ready", "False", "PodRefused"), ("Reconciled", "False", "Forbidden")], "Forbidden"),
        ([("Ready", "True", "Running"), ("Overlay", "False", "NotAsked")], None),
    ],
)
def test_start_reports_what_it_waits_for(conditions: list[tuple[str, str, str]], problem: str | None) -> None:
    found = sandbox_view(seen(*conditions)).problem
    assert (found and found.word) == problem


def test_late_start_ends_with_what_it_waited_for() -> None:
    late, pull = ("Finished", "True", "StartDeadlineExceeded"), ("ImagePulled", "False", "ImagePullBackOff")
    assert sandbox_view(seen(pull, late)).ending == Reason("ImagePullBackOff", "words")
    assert sandbox_view(seen(late)).ending == Reason("StartDeadlineExceeded", "words")
    evicted = seen(("Ready", "False", "Finished"), ("Finished", "True", "Evicted"))
    assert sandbox_view(evicted).ending == Reason("Evicted", "words")


def test_a_sandbox_that_is_being_deleted_has_ended() -> None:
    going = seen(("Ready", "True", "Running"), **{POD_IP: "10.0.0.7"})
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    view = sandbox_view(going)
    assert (view.finished and view.finished.word, view.can_be_reached) == ("SandboxDeleted", False)


def test_reason_of_the_operator_is_preferred_to_the_deletion() -> None:
    going = seen(("Finished", "True", "Evicted"))
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert sandbox_view(going).finished == Reason("Evicted", "words")


def test_the_owner_is_the_rollout_job_alone() -> None:
    owners = [{"kind": "Pod", "uid": "p"}, {"kind": "RolloutJob", "uid": "j"}]
    assert owner_uid({"metadata": {"name": "one", "ownerReferences": owners}}) == "j"
    assert owner_uid({"metadata": {"name": "one"}}) is None
