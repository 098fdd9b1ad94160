"""SIGTERM must neither discard work of a job that continues, nor keep a pod of a deleted job."""

from typing import Any

import pytest

from agent_runtime.kube.api import ApiError
from agent_runtime.runner.job_state import JobState, job_state_of
from rollout_api.conditions import Metadata

JOB = Metadata(name="job", namespace="team", uid="uid-1")


def job(uid: str = "uid-1", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "job", "uid": uid}, "spec": spec}


@pytest.mark.parametrize("answer", [job(), job(suspend=True), ApiError(0, "Unreachable", ""), ApiError(503, "", "")])
def test_suspension_eviction_and_an_api_server_that_is_away_drain(answer: dict[str, Any] | ApiError) -> None:
    assert job_state_of(JOB, answer) is JobState.CONTINUES


@pytest.mark.parametrize(
    "answer",
    [
        ApiError(404, "NotFound", ""),
        ApiError(403, "Forbidden", ""),
        ApiError(401, "Unauthorized", ""),
        job(uid="uid-2"),
        {"metadata": {"name": "job", "uid": "uid-1", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
)
def test_a_job_that_is_deleted_or_replaced_ends_its_runners_at_once(answer: dict[str, Any] | ApiError) -> None:
    assert job_state_of(JOB, answer) is JobState.CANCELLED
