"""Conditions say what the job waits for, and since when."""

from typing import Any

import pytest

from rollout_operator.rollout_job.status import differs_in_counts_only
from tests.unit.rollout_operator.rollout_job.scenes import Scene, manifest, report


def with_pod(status: dict[str, Any], **metadata: Any) -> Scene:
    scene = Scene(manifest())
    scene.settle()
    (pod,) = scene.runners
    scene.cache.put("Pod", {**pod, "metadata": pod["metadata"] | metadata, "status": status})
    scene.settle()
    return scene


def waiting(reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "runner", "state": state}]}


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (waiting("ImagePullBackOff", 'Back-off pulling image "x"'), "ImagePullBackOff", 'Back-off pulling image "x"'),
        (waiting("ErrImagePull", "not found"), "ImagePullBackOff", "not found"),
        (
            waiting("CreateContainerConfigError", 'secret "store" not found'),
            "CreateContainerConfigError",
            'runner 0 waits: secret "store" not found',
        ),
        (waiting("ContainerCreating", ""), "RunnersStarting", "0 of 1 runners"),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient cpu.",
                    }
                ],
            },
            "Unschedulable",
            "0/3 nodes are available: 3 Insufficient cpu.",
        ),
        ({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}, "RunnersUp", "1 of 1"),
    ],
)
def test_ready_condition_names_what_a_runner_waits_for(status: dict[str, Any], reason: str, words: str) -> None:
    ready = with_pod(status).condition("Ready")
    assert (ready["reason"], ready["status"]) == (reason, str(reason == "RunnersUp"))
    assert words in ready["message"]
    # The word that `kubectl get` shows.
    state = with_pod(status).condition("Progressing")
    assert (state["status"], state["reason"]) == ("True", "RunnersStarting" if reason == "RunnersUp" else reason)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "runner 0: Evicted: low on memory"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}],
            },
            "runner 0: OOMKilled, exit code 137",
        ),
        ({"phase": "Failed"}, "runner 0: its pod failed without a reported reason"),
    ],
)
def test_restart_is_reported_with_the_failure_of_the_runner(status: dict[str, Any], words: str) -> None:
    scene = Scene(manifest())
    scene.settle()
    scene.runner_fails()
    (failed,) = (pod for pod in scene.cache.all("Pod") if pod["status"]["phase"] == "Failed")
    scene.cache.put("Pod", {**failed, "status": status})
    scene.settle()
    progressing = scene.condition("Progressing")
    assert progressing["reason"] == "RunnerRestarted"
    assert progressing["message"].startswith(words)
    assert progressing["message"].endswith("(1 failure since the last new result, 10 in a row fail the job)")


def test_status_shows_what_a_runner_waits_for() -> None:
    scene = Scene(manifest())
    scene.settle()
    scene.reports(report(0, total=8, sealed=2, running=3, message="storage does not answer"))
    scene.settle()
    assert scene.condition("Progressing")["message"] == (
        "2 of 8 rollouts sealed, 3 running; runner 0: storage does not answer"
    )


def test_a_condition_keeps_the_time_at_which_it_last_changed() -> None:
    scene = Scene(manifest())
    scene.settle()
    started = scene.condition("Ready")["lastTransitionTime"]
    scene.passes(100)
    scene.reports(report(0, total=8, sealed=2))
    scene.settle()
    assert scene.condition("Progressing")["lastTransitionTime"] == started
    scene.passes(100)
    scene.job["spec"]["suspend"] = True
    scene.settle()
    assert scene.condition("Suspended")["lastTransitionTime"] == "2026-03-01T12:03:20Z"


def test_conditions_tell_of_which_generation_they_are() -> None:
    scene = Scene(manifest())
    scene.settle()
    scene.job["metadata"]["generation"] = 2
    scene.settle()
    assert scene.status["observedGeneration"] == 2
    assert {c["observedGeneration"] for c in scene.status["conditions"]} == {2}


def test_a_list_of_problems_longer_than_a_condition_may_be_is_cut_and_not_refused() -> None:
    bad = [{"name": f"t{n}", "prompt": "p", "verifier": {"commands": []}} for n in range(200)]
    scene = Scene(manifest(tasks={"inline": bad}))
    scene.settle()
    assert len(scene.condition("Invalid")["message"]) == 4096


def test_pods_that_failed_or_were_disrupted_are_written_at_once_and_other_counts_later() -> None:
    before: dict[str, Any] = {"restarts": {"failedPods": 1, "sealed": 2}, "sealed": 2}
    assert differs_in_counts_only(before, {**before, "sealed": 3})
    for count in ("failedPods", "disruptedPods"):
        assert not differs_in_counts_only(before, {**before, "restarts": {**before["restarts"], count: 2}})
