"""Jobs from their manifest to their end: started, refused, shared, suspended, resumed, deleted, and created again."""

from collections.abc import Callable

import pytest

from tests.support.cluster import (
    QUICKSTART_IMAGE,
    STORAGE_SECRET,
    Cluster,
    Job,
    eventually,
    slow_quickstart,
    small_job,
    storage_secret,
)
from tests.support.scripted import careful, finish, scripted_job, task, turn

NewJob = Callable[..., Job]


def wait_gone(job: Job, seconds: float = 60) -> None:
    """Wait until only the results of a deleted job are left."""
    gone = lambda: not (job.pods("runner") or job.pods("sandbox") or job.sandboxes()) or None  # noqa: E731
    eventually(gone, seconds, lambda: f"{job.name} left {job.pods('runner')}, {job.pods('sandbox')}")
    assert job.cluster.get("rolloutjob", job.name, job.namespace) is None


def running(job: Job) -> list[str]:
    """Return its runner pods that have not ended."""
    return [pod["metadata"]["name"] for pod in job.pods("runner") if pod["status"]["phase"] in ("Pending", "Running")]


@pytest.mark.full
def test_suspended_job_releases_its_sandboxes_and_resumes_without_an_attempt(new_job: NewJob) -> None:
    # Each rollout has a single attempt, so an attempt used up by the suspension would change the outcome.
    job = new_job(slow_quickstart(2, groupSize=2, attempts={"limit": 1}, runners={"concurrency": 4})).apply()
    job.wait_sealed(2)
    assert job.pods("sandbox")

    job.suspend(True)
    # The kubelet kills draining runners after 30 s; the rest is time until the operator notices.
    job.wait("Suspended", 45)
    assert not running(job), job.describe()
    eventually(lambda: not (job.sandboxes() or job.pods("sandbox")) or None, 60, job.describe)
    before = {key: job.read(key) for key in job.keys("seals")}
    assert 2 <= len(before) < 12
    assert job.status["sealed"] == len(before)

    job.suspend(False)
    job.wait("Succeeded")
    assert [result["index"] for result in job.results()] == list(range(12))
    assert {result["outcome"] for result in job.results()} == {"Completed"}
    assert {key: job.read(key) for key in before} == before
    assert job.condition("Suspended")["status"] == "False"


@pytest.mark.full
def test_a_job_whose_role_is_deleted_gets_it_back_and_masks_no_rollout(new_job: NewJob) -> None:
    # In Plain each workspace asks for a Sandbox. One attempt is all that a rollout has.
    manifest = scripted_job(
        "rights", [task(f"t{n}") for n in range(8)], {"careful": careful(0.5)}, attempts={"limit": 1}
    )
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Plain"}
    manifest["spec"]["runners"] = {"concurrency": 2}
    job = new_job(manifest).apply()
    job.wait_sealed(1)
    job.cluster.kubectl("delete", "role,rolebinding", "rights-runner", "-n", job.namespace)
    job.wait("Succeeded")
    assert [(result["index"], result["outcome"], result["reward"]) for result in job.results()] == [
        (index, "Completed", 1) for index in range(8)
    ]


def test_three_runners_share_the_groups_of_a_job(new_job: NewJob) -> None:
    workspaces = {"mode": "Overlay", "perSandbox": 8}
    sandbox = {"image": QUICKSTART_IMAGE, "workspaces": workspaces, "resources": {"cpu": "10m", "memory": "64Mi"}}
    job = new_job(small_job("shared", tasks=24, runners={"replicas": 3, "concurrency": 8}, sandbox=sandbox)).apply()
    job.wait("Succeeded")
    results = job.results()
    assert [result["index"] for result in results] == list(range(24))
    assert {(result["outcome"], result["reward"]) for result in results} == {("Completed", 1)}
    status = job.status
    shares = [(r["index"], r["state"], r["sealed"], r["sealedIndexes"]) for r in job.reports]
    assert sorted(shares) == [(index, "Completed", 8, "0-7") for index in range(3)]
    assert (status["total"], status["sealed"], status["outcomes"]) == (24, 24, {"Completed": 24})


def test_jobs_of_one_name_in_two_namespaces_are_independent(new_namespace: Callable[..., str], new_job: NewJob) -> None:
    team, other = new_namespace(), new_namespace("restricted")
    # A restricted namespace accepts only a numeric user that is not root, and that user cannot write everywhere.
    restricted = {"image": QUICKSTART_IMAGE, "user": "1000", "workingDir": "/tmp/workspace"}
    jobs = [
        new_job(small_job("same", tasks=2), team).apply(),
        new_job(small_job("same", tasks=3, sandbox=restricted), other).apply(),
    ]
    for job, tasks in zip(jobs, (2, 3), strict=True):
        job.wait("Succeeded")
        assert [(result["index"], result["reward"]) for result in job.results()] == [(i, 1) for i in range(tasks)]
    jobs[0].delete()
    wait_gone(jobs[0])
    assert jobs[1].condition("Succeeded")["status"] == "True"


@pytest.mark.full
def test_job_applied_again_under_its_old_name_starts_a_new_run(new_job: NewJob) -> None:
    first = new_job(slow_quickstart(2, groupSize=1, runners={"concurrency": 2})).apply()
    first.wait_sealed(1)
    sealed = {key: first.read(key) for key in first.keys("seals")}
    # The name is reused while the old job's runner, Secret and sandboxes still exist.
    first.delete("--wait=false")
    eventually(lambda: first.cluster.get("rolloutjob", first.name, first.namespace) is None or None, 30)

    second = new_job(small_job(first.name, tasks=2)).apply()
    second.wait("Succeeded")
    assert second.uid != first.uid
    assert [(result["task"], result["reward"]) for result in second.results()] == [("task-0", 1), ("task-1", 1)]
    assert {key: first.read(key) for key in sealed} == sealed
    assert second.status["total"] == 2


def test_suspended_job_waits_and_a_finished_job_is_deleted_after_its_ttl(new_job: NewJob) -> None:
    job = new_job(small_job("finite", suspend=True, ttlSecondsAfterFinished=3600)).apply()
    job.wait("Suspended")
    assert not job.pods("runner")
    job.suspend(False)
    job.wait("Succeeded")
    assert job.pods("runner"), "the log of a finished job can be read"
    # It may be changed at any time, also after the end.
    job.patch({"ttlSecondsAfterFinished": 0})
    wait_gone(job)
    assert [result["reward"] for result in job.results()] == [1]


def test_job_that_cannot_start_gives_the_reason_and_starts_later(
    cluster: Cluster, namespace: str, new_job: NewJob
) -> None:
    job = new_job(small_job("waiting"))
    job.manifest["spec"]["output"]["secretRef"] = "forgotten"
    nowhere = new_job(small_job("nowhere"))
    nowhere.manifest["spec"]["output"]["uri"] = "s3://no-such-bucket/results"
    job.apply(), nowhere.apply()

    def says(told: Job, reason: str, words: str) -> bool | None:
        found = told.condition("Progressing")
        return (found.get("reason") == reason and words in found["message"]) or None

    eventually(lambda: says(job, "CreateContainerConfigError", 'secret "forgotten" not found'), 60, job.describe)
    eventually(lambda: says(nowhere, "RunnerRestarted", "NoSuchBucket"), 120, nowhere.describe)
    cluster.apply(storage_secret(cluster, namespace) | {"metadata": {"name": "forgotten", "namespace": namespace}})
    job.wait("Succeeded")


def test_job_whose_rollouts_are_all_lost_gives_the_reason(new_job: NewJob) -> None:
    # The image has no such user, which only a sandbox detects.
    job = new_job(small_job("lost", sandbox={"image": QUICKSTART_IMAGE, "user": "nobody-here"}, attempts={"limit": 1}))
    job.apply().wait("Succeeded")
    assert job.status["outcomes"] == {"InfraFailed": 1}
    told = job.condition("Succeeded")["message"]
    assert "1 rollout lost to infrastructure" in told
    assert "user 'nobody-here' is not in the workspace's /etc/passwd" in told


@pytest.mark.full
@pytest.mark.alone
def test_laptop_only_settings_are_named_and_chart_defaults_apply(
    cluster: Cluster, unasked_namespace: str, chart_values: Callable[..., None]
) -> None:
    namespace = unasked_namespace
    manifest = small_job("laptop", output={"uri": "out"})
    manifest["spec"]["model"] = {
        "endpoint": {"baseURL": "http://localhost:8000/v1", "name": "m", "apiKeyFrom": {"env": "KEY"}}
    }
    job = Job(cluster, namespace, manifest).apply()
    invalid = eventually(lambda: job.condition("Invalid") or None, 60, job.describe)
    assert invalid["status"] == "True"
    fields = ("spec.output.uri", "spec.model.endpoint.baseURL", "spec.model.endpoint.apiKeyFrom.env")
    assert all(field in invalid["message"] for field in fields), invalid
    assert not cluster.list("jobs", namespace)
    assert not cluster.list("pods", namespace)

    uri = f"s3://{cluster.bucket}/{namespace}/defaults"
    chart_values(
        "--set", f"defaults.output.uri={uri},defaults.output.secretRef={STORAGE_SECRET}",
        "--set", "defaults.model.endpoint.baseURL=http://model.models:8000/v1,defaults.model.endpoint.name=m",
    )  # fmt: skip
    eventually(lambda: not job.condition("Invalid") or None, 60, job.describe)
    job.wait("Succeeded")
    assert job.status["resultURI"].startswith(uri)


def test_kubectl_shows_a_jobs_progress_and_each_fields_meaning(cluster: Cluster, new_job: NewJob) -> None:
    fast, slow = [turn("touch done"), finish()], [turn("sleep 600"), finish()]
    tasks = [task(name, verifier={"commands": ["test -e done"]}) for name in ("one", "two")]
    completion = {"minCompletedPerGroup": 1, "cancelStragglers": True}
    job = new_job(scripted_job("readable", tasks, {"fast": fast, "slow": slow}, completion=completion)).apply()
    job.wait("Succeeded")
    told = {"NAME": "readable", "STATE": "Succeeded", "SEALED": "4", "TOTAL": "4", "COMPLETED": "2", "REWARD": "1"}
    assert told.items() <= job.columns().items()
    told |= {"LOST": "", "UNGRADED": "", "CANCELLED": "2", "RESULTS": job.status["resultURI"]}
    assert told.items() <= job.columns("-o", "wide").items()

    def events() -> str | None:
        described = cluster.kubectl("describe", "rolloutjob", job.name, "-n", job.namespace).stdout.partition("Events:")
        return described[2] if "Succeeded" in described[2] else None

    story = eventually(events, 30, job.describe)
    assert "starting 1 runner for 4 rollouts" in story
    assert job.status["resultURI"] in story
    found = [
        (event["involvedObject"]["uid"], event["reason"], event["message"])
        for event in cluster.list("events", job.namespace)
        if event["source"].get("component") == "rollout-operator"
    ]
    assert len(found) == len(set(found)), "what happens again is counted, not told again"

    for field, words in {
        "rolloutjob.spec.groupSize": "Rollouts of each task",
        "rolloutjob.spec.tasks.stream": "stays open",
        "rolloutjob.status.meanReward": "rollouts that have a reward",
        "sandbox.spec.clients": "pods that may",
    }.items():
        assert words in " ".join(cluster.kubectl("explain", field).stdout.split()), field
