"""The life of a job: started once, suspended and resumed without loss, judged by its runners, cleaned up."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.rollout_job import RolloutJobStatus
from rollout_operator.actions import Create, Delete, EnsureKey, Patch
from rollout_operator.rollout_job.plan import needs_spec
from tests.support.full import examples
from tests.unit.rollout_operator.rollout_job.scenes import Scene, config, manifest, report

DONE = {"total": 8, "sealed": 8, "outcomes": {"Completed": 8}, "rewardSum": 6.0, "rewarded": 8}


def running(**spec: Any) -> Scene:
    scene = Scene(manifest(**spec))
    scene.settle()
    return scene


def test_pods_start_only_when_all_required_objects_exist() -> None:
    scene = Scene(manifest())
    assert [type(action) for action in scene.plan().actions] == [EnsureKey], "the key comes first, and alone"
    scene.settle()
    assert scene.made == ["Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "RolloutShard", "Job"]


def test_runner_job_has_the_queue_label_of_kueue() -> None:
    job = manifest()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team", "owner": "me", "rollout.dev/job": "another"}
    scene = Scene(job)
    scene.settle()
    assert scene.batch_job is not None
    labels = scene.batch_job["metadata"]["labels"]
    assert (labels["kueue.x-k8s.io/queue-name"], labels["rollout.dev/job"]) == ("team", "sums")
    assert "owner" not in labels


def test_deleted_shard_object_is_created_again() -> None:
    scene = running(runners={"replicas": 2})
    first, second = (shard["metadata"]["name"] for shard in scene.cache.all("RolloutShard"))
    scene.cache.remove("RolloutShard", "team", first)
    scene.settle()
    assert {shard["metadata"]["name"] for shard in scene.cache.all("RolloutShard")} == {first, second}


def test_deleted_network_policy_is_created_again_while_the_job_runs() -> None:
    scene = running()
    scene.cache.remove("NetworkPolicy", "team", "sums-runner")
    scene.settle()
    assert scene.cache.get("NetworkPolicy", "team", "sums-runner") is not None


def test_deleted_service_account_is_made_again_when_runner_pods_are_missing() -> None:
    scene = running(runners={"replicas": 2})
    scene.passes(31)
    assert scene.plan().actions == ()
    scene.cache.remove("Pod", "team", scene.runners[0]["metadata"]["name"])
    assert needs_spec(scene.observe())
    made = [action.body["kind"] for action in scene.plan().actions if isinstance(action, Create)]
    assert made == ["ServiceAccount", "Role", "RoleBinding"]
    waiting = scene.settle()
    assert "1 have no pod yet: kubectl describe job sums-runner -n team" in scene.condition("Ready")["message"]
    assert waiting.requeue_seconds == 60
    scene.passes(30)
    assert not any(isinstance(action, Create) for action in scene.plan().actions)


def test_a_finished_job_is_deleted_after_a_week_by_default() -> None:
    scene = running()
    scene.runner_ends(0, "Completed", sealed=8)
    scene.settle()
    scene.passes(7 * 24 * 3600 - 60)
    scene.settle()
    assert not scene.gone
    scene.passes(120)
    scene.settle()
    assert scene.gone


def test_running_job_without_changes_causes_no_write() -> None:
    scene = running()
    writes = scene.status_writes
    for _ in range(5):
        scene.passes(60)
        scene.settle()
    assert scene.status_writes == writes


def test_events_of_a_job_are_in_order_and_complete() -> None:
    scene = running()
    scene.runner_fails()
    scene.settle()
    scene.reports(report(0, total=8, sealed=3))
    scene.settle()
    for suspend in (True, False):
        scene.job["spec"]["suspend"] = suspend
        scene.settle()
    scene.runner_ends(0, "Completed", **DONE)
    scene.settle()
    assert scene.told() == ["Started", "RunnerRestarted", "Suspended", "Resumed", "Succeeded"]
    assert scene.events[-1].message == (
        "8 of 8 rollouts sealed; 8 Completed; mean reward 0.75; results are in s3://bucket/runs/sums-5f0c2c1e"
    )


def test_failing_runner_is_reported_together_with_a_new_result() -> None:
    scene = running()
    scene.runner_fails()
    scene.reports(report(0, total=8, sealed=3))
    scene.settle()
    assert "RunnerRestarted" in scene.told()


def test_each_failure_of_a_runner_is_reported() -> None:
    scene = running()
    for _ in range(3):
        scene.runner_fails()
        scene.passes(20)
        scene.settle()
    assert scene.told().count("RunnerRestarted") == 3


def test_evicted_runners_do_not_fail_a_job() -> None:
    scene = running()
    for _ in range(12):
        scene.runner_is_evicted()
        scene.passes(20)
        scene.settle()
    assert scene.condition("Failed")["status"] == "False"
    for _ in range(10):
        assert scene.condition("Failed")["status"] == "False"
        scene.runner_fails()
        scene.passes(20)
        scene.settle()
    assert scene.condition("Failed")["reason"] == "RunnersFail"


def test_invalid_job_starts_nothing_and_is_reported_once() -> None:
    scene = Scene(manifest(output={"uri": "out"}))
    scene.settle()
    scene.passes(600)
    scene.settle()
    assert scene.made == []
    assert scene.told() == ["InvalidSpec"]
    assert scene.condition("Invalid")["message"].startswith(
        "the job was not started: spec.output.uri: 'out' is a local folder"
    )
    assert scene.condition("Progressing")["status"] == "False"


def test_an_invalid_job_starts_when_the_chart_gets_a_default_for_it() -> None:
    scene = Scene(manifest(output={"uri": "out"}))
    scene.settle()
    scene.config = config(defaults={"output": {"uri": "s3://shared", "secretRef": "store"}})
    scene.settle()
    assert "Job" in scene.made
    assert "Invalid" not in {c["type"] for c in scene.status["conditions"]}
    assert scene.status["resultURI"] == "s3://shared/sums-5f0c2c1e"


def test_changed_chart_defaults_keep_the_results_of_a_running_job() -> None:
    scene = Scene(manifest(output={"uri": "out"}), config(defaults={"output": {"uri": "s3://first"}}))
    scene.settle()
    scene.config = config(defaults={"output": {"uri": "s3://second"}})
    scene.settle()
    assert scene.status["resultURI"] == "s3://first/sums-5f0c2c1e"


def test_suspension_releases_sandboxes_after_the_last_runner() -> None:
    scene = running()
    scene.has_sandbox("sums-0-1")
    pod = scene.runners[0]
    scene.job["spec"]["suspend"] = True
    scene.carry_out(scene.plan())
    scene.cache.put("Pod", pod)  # it still finishes its turns
    scene.settle()
    assert scene.sandboxes == ["sums-0-1"]
    assert scene.condition("Suspended")["status"] == "False"
    assert scene.condition("Progressing")["reason"] == "Draining"
    scene.cache.remove("Pod", "team", pod["metadata"]["name"])
    scene.settle()
    assert scene.sandboxes == []
    assert scene.condition("Suspended")["status"] == "True"


def test_a_job_created_suspended_starts_no_pod_until_it_is_released() -> None:
    scene = running(suspend=True)
    assert scene.runners == []
    assert scene.condition("Suspended")["status"] == "True"
    scene.job["spec"]["suspend"] = False
    scene.settle()
    assert len(scene.runners) == 1
    assert scene.told() == ["Suspended", "Resumed"]


def test_suspended_is_reported_only_when_all_sandboxes_are_deleted() -> None:
    scene = running()
    scene.has_sandbox("sums-0-1")
    scene.job["spec"]["suspend"] = True
    scene.carry_out(scene.plan())
    scene.carry_out(deletes := scene.plan())
    assert [type(action) for action in deletes.actions][:1] == [Delete]
    assert (scene.told(), scene.condition("Suspended")["status"]) == (["Started"], "False"), (
        "the budget may delay deletes"
    )
    assert "sandboxes are being deleted" in scene.condition("Progressing")["message"]
    scene.settle()
    assert (scene.told(), scene.condition("Suspended")["status"]) == (["Started", "Suspended"], "True")


@pytest.mark.parametrize(("completions", "parallelism"), [(1, 1), (3, 3), (2, 0), (2, 1), (2, 3)])
def test_number_of_runners_that_someone_edited_is_restored_while_the_job_runs(
    completions: int, parallelism: int
) -> None:
    scene = running(runners={"replicas": 2})
    assert scene.batch_job is not None
    scene.batch_job["spec"] |= {"completions": completions, "parallelism": parallelism}
    scene.settle()
    assert (scene.batch_job["spec"]["completions"], scene.batch_job["spec"]["parallelism"]) == (2, 2)


@pytest.mark.parametrize(("parallelism", "kept"), [(1, 1), (0, 2)])
def test_parallelism_that_kueue_admitted_is_kept_unless_no_runner_is_left(parallelism: int, kept: int) -> None:
    scene = running(runners={"replicas": 2})
    assert scene.batch_job is not None
    scene.batch_job["metadata"]["annotations"] |= {"kueue.x-k8s.io/job-min-parallelism": "1"}
    scene.batch_job["spec"]["parallelism"] = parallelism
    scene.settle()
    assert scene.batch_job["spec"]["parallelism"] == kept


def test_suspension_by_another_manager_is_kept_and_reported() -> None:
    scene = running()
    scene.has_sandbox("sums-0-1")
    scene.another_manager_suspends(True)
    scene.settle()
    assert scene.runners == [], "the operator resumed a Job that Kueue had suspended"
    assert scene.sandboxes == []
    suspended = scene.condition("Suspended")
    assert (suspended["status"], suspended["reason"]) == ("True", "SuspendedByAnotherManager")
    assert "Job sums-runner" in suspended["message"]
    scene.another_manager_suspends(False)
    scene.settle()
    assert len(scene.runners) == 1
    assert scene.condition("Suspended")["status"] == "False"
    assert scene.told() == ["Started", "Suspended", "Resumed"]


def test_a_job_resumed_by_another_manager_is_not_suspended_again() -> None:
    scene = running(suspend=True)
    scene.another_manager_suspends(False)
    scene.settle()
    assert len(scene.runners) == 1
    assert "another manager" in scene.condition("Suspended")["message"]


def test_change_of_the_rollout_job_overrides_another_manager() -> None:
    scene = running()
    scene.another_manager_suspends(True)
    for suspend in (True, False):
        scene.job["spec"]["suspend"] = suspend
        scene.settle()
    assert len(scene.runners) == 1


def test_runner_on_a_dead_node_delays_a_suspension_for_a_limited_time() -> None:
    scene = running()
    pod = scene.runners[0]
    scene.job["spec"]["suspend"] = True
    scene.carry_out(scene.plan())
    pod["metadata"]["deletionTimestamp"] = scene.now.isoformat()
    scene.cache.put("Pod", pod)
    waiting = scene.settle()
    assert scene.condition("Suspended")["status"] == "False"
    assert waiting.requeue_seconds is not None, "nobody will tell"
    scene.passes(waiting.requeue_seconds + 1)
    scene.settle()
    assert scene.condition("Suspended")["status"] == "True"


def test_ten_failures_without_a_new_result_fail_the_job_and_end_its_pods() -> None:
    scene = running()
    for _ in range(10):
        assert scene.condition("Failed")["status"] == "False"
        scene.runner_fails()
        scene.passes(30)
        scene.settle()
    assert scene.condition("Failed")["reason"] == "RunnersFail"
    assert "storage is away" in scene.condition("Failed")["message"]
    assert scene.runners == []
    scene.reports(report(0, total=8, sealed=1))
    scene.settle()
    assert scene.runners == [], "a result that comes too late starts nothing either"


def test_failed_job_continues_after_suspend_and_resume() -> None:
    scene = running()
    scene.reports(report(0, total=8, sealed=5))
    scene.settle()
    for _ in range(10):
        scene.runner_fails()
        scene.settle()
    assert scene.condition("Failed")["status"] == "True"
    for suspend in (True, False):
        scene.job["spec"]["suspend"] = suspend
        scene.settle()
    assert scene.condition("Failed")["status"] == "False"
    assert len(scene.runners) == 1
    assert scene.made.count("Job") == 2, "Kubernetes lets a Job that failed ten times wait for ten minutes"
    scene.runner_fails()
    scene.settle()
    assert scene.condition("Failed")["status"] == "False", "failures of before the mending count no more"
    assert scene.told()[-3:] == ["Suspended", "Resumed", "RunnerRestarted"]


def test_draining_runners_keep_their_sandboxes_when_failed_runners_are_removed() -> None:
    scene = running(runners={"replicas": 2})
    scene.has_sandbox("sums-1-1")
    draining = scene.runners[1]
    for _ in range(10):
        scene.runner_fails(0)
        scene.carry_out(scene.plan())
    assert scene.condition("Failed")["reason"] == "RunnersFail"
    draining["metadata"]["deletionTimestamp"] = scene.now.isoformat()
    scene.cache.put("Pod", draining)
    scene.job["spec"]["suspend"] = True
    scene.settle()
    assert scene.sandboxes == ["sums-1-1"]
    scene.cache.remove("Pod", "team", draining["metadata"]["name"])
    scene.cache.remove("Job", "team", "sums-runner")
    scene.settle()
    assert scene.sandboxes == []


def test_resumed_job_does_not_wait_for_a_pod_of_a_lost_node() -> None:
    scene = running(runners={"replicas": 2})
    lost = scene.runners[1]
    for _ in range(10):
        scene.runner_fails(0)
        scene.carry_out(scene.plan())
    lost["metadata"]["deletionTimestamp"] = scene.now.isoformat()
    scene.cache.put("Pod", lost)
    scene.job["spec"]["suspend"] = True
    scene.carry_out(scene.plan())
    job = copy.deepcopy(dict(scene.batch_job or {}))
    job["metadata"]["deletionTimestamp"] = scene.now.isoformat()
    scene.cache.put("Job", job)
    scene.job["spec"]["suspend"] = False
    waiting = scene.plan()
    assert not [action for action in waiting.actions if isinstance(action, Delete | Patch)]
    assert waiting.requeue_seconds is not None, "nobody will tell"
    scene.passes(waiting.requeue_seconds + 1)
    assert [action.foreground for action in scene.plan().actions if isinstance(action, Delete)] == [False]


def test_job_aborted_by_one_runner_lets_the_others_end_by_themselves() -> None:
    scene = running(runners={"replicas": 2})
    scene.has_sandbox("sums-1-1")
    scene.runner_ends(0, "Aborted", message="8 of 20 rollouts were lost")
    scene.settle()
    assert scene.condition("Failed") | {"lastTransitionTime": ""} == {
        "type": "Failed",
        "status": "True",
        "reason": "Aborted",
        "message": "8 of 20 rollouts were lost",
        "observedGeneration": 1,
        "lastTransitionTime": "",
    }
    assert scene.condition("Progressing")["reason"] == "Ending"
    assert (len(scene.runners), scene.sandboxes) == (1, ["sums-1-1"])
    scene.runner_ends(1, "Aborted")
    scene.settle()
    assert scene.sandboxes == []
    assert scene.condition("Progressing")["status"] == "False"


def test_a_runner_that_gave_up_and_ends_with_an_error_is_not_started_again() -> None:
    scene = running()
    scene.reports(report(0, "Aborted", message="there is no tool of that name"))
    scene.runner_fails()
    for pod in scene.runners:  # Kubernetes waits 10 s before it starts another one
        scene.cache.remove("Pod", "team", pod["metadata"]["name"])
    scene.settle()
    scene.kubernetes_follows()
    assert scene.runners == []
    assert scene.condition("Failed")["message"] == "there is no tool of that name"


def test_a_finished_job_is_deleted_when_its_time_is_over_and_not_before() -> None:
    scene = running(ttlSecondsAfterFinished=100)
    scene.passes(1000)
    scene.settle()
    assert not scene.gone, "it has not finished"
    scene.runner_ends(0, "Completed", **DONE)
    last = scene.settle()
    assert last.requeue_seconds == 100
    scene.passes(99)
    scene.settle()
    assert not scene.gone
    scene.passes(1)
    scene.settle()
    assert scene.gone


def test_deleted_job_is_left_to_garbage_collection() -> None:
    scene = running()
    scene.has_sandbox("sums-0-1")
    scene.job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    scene.cache.remove("Job", "team", "sums-runner")
    step = scene.plan()
    assert (step.actions, step.status) == ((), None)


def test_counts_alone_are_written_at_most_every_ten_seconds() -> None:
    scene = running()
    scene.reports(report(0, total=8))
    scene.settle()
    writes = scene.status_writes
    for sealed in range(1, 9):
        scene.passes(1)
        scene.reports(report(0, total=8, sealed=sealed))
        scene.carry_out(step := scene.plan())
        assert step.requeue_seconds is not None, "what was held back must be told later"
    assert scene.status_writes == writes
    scene.passes(10)
    scene.settle()
    assert scene.status["sealed"] == 8


def test_deleted_runner_job_is_created_again_before_the_end() -> None:
    scene = running()
    scene.cache.remove("Job", "team", "sums-runner")
    scene.settle()
    assert scene.made.count("Job") == 2


def test_deleted_runner_job_of_an_ended_job_is_not_created_again() -> None:
    scene = running()
    scene.runner_ends(0, "Completed", **DONE)
    scene.settle()
    scene.cache.remove("Job", "team", "sums-runner")
    scene.settle()
    assert scene.made.count("Job") == 1


STEPS = (
    "fails",
    "seals",
    "completes",
    "aborts",
    "suspends",
    "resumes",
    "other suspends",
    "other resumes",
    "time",
    "sandbox",
    "operator restarts",
)
happenings = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), max_size=40)


def let_happen(scene: Scene, what: str, index: int) -> None:
    entry = next((r for r in scene.reported if r["index"] == index), report(index, total=3))
    at_work = entry["state"] == "Running" and len(scene.runners) > 0
    match what:
        case "fails" if at_work:
            scene.runner_fails(index)
        case "seals" if at_work and entry["sealed"] < 3:
            sealed = entry["sealed"] + 1
            scene.reports(entry | {"sealed": sealed, "outcomes": {"Completed": sealed}})
        case "completes" if at_work:
            scene.runner_ends(index, "Completed", total=3, sealed=3, outcomes={"Completed": 3})
        case "aborts" if at_work:
            scene.runner_ends(index, "Aborted", message="too much was lost", total=3)
        case "suspends" | "resumes":
            scene.job["spec"]["suspend"] = what == "suspends"
            scene.job["metadata"]["generation"] += 1
        case "other suspends" | "other resumes" if scene.batch_job is not None:
            scene.another_manager_suspends(what == "other suspends")
        case "time":
            scene.passes(30)
        case "sandbox" if scene.runners:
            scene.has_sandbox(f"sums-{index}-1")
        case "operator restarts":
            scene.keys.clear()


@settings(max_examples=examples(150))
@given(happenings, st.booleans())
def test_plans_converge_and_keep_their_invariants_after_any_events(steps: list[tuple[str, int]], eager: bool) -> None:
    scene = Scene(manifest(runners={"replicas": 3}))
    ended = ""
    for what, index in steps:
        if eager or what in ("resumes", "completes"):
            scene.settle()
        let_happen(scene, what, index)
        step = scene.plan()
        scene.carry_out(step)
        RolloutJobStatus.model_validate(scene.status)
        told = {c["type"]: c["status"] for c in scene.status.get("conditions", ())}
        if told.get("Succeeded") == "True":
            assert [r["state"] for r in scene.reported] == ["Completed"] * 3
        assert not (told.get("Succeeded") == told.get("Failed") == "True")
        if ended == "Succeeded" or (ended and scene.condition("Failed")["reason"] == "Aborted"):
            assert told[ended] == "True", "a verdict stands"
            assert not any(isinstance(action, Create) for action in step.actions)
        ended = next((kind for kind in ("Succeeded", "Failed") if told.get(kind) == "True"), "")
        if scene.status.get("total") is not None:
            assert scene.status["sealed"] <= scene.status["total"]
            assert sum(scene.status["outcomes"].values()) <= scene.status["total"]
    scene.passes(30)
    scene.settle()
    again = scene.plan()
    assert (again.actions, again.status, again.events) == ((), None, ())
    if ended and not scene.runners:
        assert scene.sandboxes == []
