"""Success needs the success of every runner; a failure names its cause."""

import pytest

from rollout_api.cluster import shard_name
from tests.unit.rollout_operator.rollout_job.scenes import UID, Scene, manifest, report


def two_runners() -> Scene:
    scene = Scene(manifest(runners={"replicas": 2}))
    scene.settle()
    return scene


def test_reports_give_no_success_while_pods_run() -> None:
    scene = two_runners()
    scene.reports(report(0, "Completed"), report(1, "Completed"))
    scene.settle()
    assert scene.condition("Succeeded")["status"] == "False"


def test_a_report_that_is_late_is_waited_for() -> None:
    scene = two_runners()
    scene.runner_ends(0, "Completed")
    scene.runner_ends(1, "Running")
    waiting = scene.settle()
    assert (scene.condition("Succeeded")["status"], scene.condition("Failed")["status"]) == ("False", "False")
    assert waiting.requeue_seconds is not None, "it may never come"
    scene.reports(report(1, "Completed"))
    scene.settle()
    assert scene.condition("Succeeded")["status"] == "True"


def test_a_pod_that_hangs_on_a_dead_node_does_not_keep_a_job_from_success() -> None:
    scene = two_runners()
    for index in range(2):
        scene.runner_ends(index, "Completed")
    job = scene.batch_job
    assert job is not None
    (complete,) = job["status"]["conditions"]
    status = {**job["status"], "conditions": [{**complete, "type": "SuccessCriteriaMet"}], "terminating": 1}
    scene.cache.put("Job", {**job, "status": status})
    scene.settle()
    assert scene.condition("Succeeded")["status"] == "True"


def test_runner_that_ended_without_a_report_is_not_a_success() -> None:
    scene = two_runners()
    scene.runner_ends(0, "Completed")
    scene.runner_ends(1, "Draining")
    scene.passes(181)
    scene.settle()
    assert scene.condition("Succeeded")["status"] == "False"
    assert scene.condition("Failed")["reason"] == "NoVerdict"
    assert "runners 1" in scene.condition("Failed")["message"]
    assert "s3://bucket/runs/sums-5f0c2c1e" in scene.condition("Failed")["message"]


def test_job_succeeds_when_reports_arrive_after_no_verdict() -> None:
    scene = two_runners()
    scene.all_pods_end_well()
    scene.passes(181)
    scene.settle()
    assert scene.condition("Failed")["reason"] == "NoVerdict"
    done = {"total": 4, "sealed": 4, "outcomes": {"Completed": 4}}
    scene.reports(report(0, "Completed", **done), report(1, "Completed", **done))
    scene.settle()
    assert scene.condition("Failed")["status"] == "False"
    assert (scene.condition("Succeeded")["status"], scene.status["sealed"]) == ("True", 8)


@pytest.mark.parametrize("operator_is_away", [False, True])
def test_runners_report_again_when_a_report_was_deleted_after_its_runner_had_ended(operator_is_away: bool) -> None:
    scene, done = two_runners(), {"total": 4, "sealed": 4, "outcomes": {"Completed": 4}}
    scene.runner_ends(0, "Completed", **done)
    scene.passes(5)
    scene.cache.remove("RolloutShard", "team", shard_name("sums", UID, 0))
    if not operator_is_away:
        scene.settle()
    scene.runner_ends(1, "Completed", **done)
    scene.passes(181)
    scene.settle()
    assert scene.condition("Failed")["status"] == "False"
    assert scene.made.count("Job") == 2
    for index in range(2):
        scene.runner_ends(index, "Completed", **done)
    scene.settle()
    assert (scene.condition("Succeeded")["status"], scene.status["sealed"]) == ("True", 8)


def test_runners_that_never_report_start_again_once_for_a_deleted_shard() -> None:
    scene = two_runners()
    scene.passes(5)
    scene.cache.remove("RolloutShard", "team", shard_name("sums", UID, 1))
    scene.settle()
    for jobs in (2, 2):
        scene.all_pods_end_well()
        scene.passes(181)
        scene.settle()
        assert scene.made.count("Job") == jobs
    assert scene.condition("Failed")["reason"] == "NoVerdict"


def test_report_of_an_unknown_runner_is_ignored() -> None:
    scene = two_runners()
    scene.reports(report(7, "Aborted", total=5, sealed=5), {"index": "no number"})
    scene.settle()
    assert scene.condition("Failed")["status"] == "False"
    assert scene.status["sealed"] == 0


def test_a_job_that_kubernetes_gave_up_has_failed() -> None:
    scene = two_runners()
    job = scene.batch_job
    assert job is not None
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "was active too long"}
    scene.cache.put("Job", {**job, "status": {**job["status"], "conditions": [failed]}})
    scene.settle()
    assert scene.condition("Failed")["reason"] == "DeadlineExceeded"
