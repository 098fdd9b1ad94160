"""SandboxPools with real pods: jobs share them, they grow and shrink, and what dies leaves nothing behind."""

from collections.abc import Callable

import pytest

from rollout_api.base import quantity_value
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, eventually
from tests.support.pools import Pool, pooled

NewJob = Callable[[Object], Job]


def test_jobs_share_a_pool_that_grows_and_shrinks(cluster: Cluster, namespace: str, new_job: NewJob) -> None:
    pool = Pool(cluster, namespace, replicas=1, maxReplicas=3, idleSeconds=3)
    pool.until(readyReplicas=1)
    first = set(pool.sandboxes())
    jobs = [new_job(pooled(name, 4, seconds=8, runners={"concurrency": 8})).apply() for name in ("one", "two")]
    pool.until(readyReplicas=3)
    for job in jobs:
        job.wait("Succeeded")
        results = job.results()
        assert [result["outcome"] for result in results] == ["Completed"] * 8
        assert {result["reward"] for result in results} == {1.0}
        assert [attempt for result in results for attempt in result["failedAttempts"]] == []
        assert not job.sandboxes()
    pool.until(readyReplicas=1, draining=0, used=0, wanted=0)
    eventually(lambda: len(pool.sandboxes()) == 1 or None, 90, lambda: str(pool.sandboxes()))
    assert first
    lines = cluster.kubectl("get", "sandboxpools", "-n", namespace).stdout.splitlines()
    assert lines[0].split() == ["NAME", "READY", "DESIRED", "USED", "PLACES", "REASON", "AGE"]
    assert lines[1].split()[:6] == ["warm", "1", "1", "0", "4", "Ready"]
    cluster.kubectl("scale", "sandboxpool/warm", "--replicas=0", "-n", namespace)
    eventually(lambda: not pool.sandboxes() or None, 90, lambda: str(pool.sandboxes()))


@pytest.mark.full
def test_a_pool_of_another_spec_replaces_the_old_one_under_running_rollouts(
    cluster: Cluster, namespace: str, new_job: NewJob
) -> None:
    pool = Pool(cluster, namespace, replicas=2)
    pool.until(readyReplicas=2)
    before = set(pool.sandboxes())
    job = new_job(pooled("long", 3, seconds=25)).apply()
    pool.until(used=6)
    pool.body["spec"]["sandbox"]["perSandbox"] = 5
    cluster.apply(pool.body)
    eventually(lambda: not before & set(pool.sandboxes()) or None, 180, lambda: str(pool.sandboxes()))
    pool.until(readyReplicas=2, draining=0)
    job.wait("Succeeded")
    assert [(one["outcome"], one["failedAttempts"]) for one in job.results()] == [("Completed", [])] * 6


@pytest.mark.full
def test_a_deleted_job_leaves_nothing_in_the_pool(cluster: Cluster, namespace: str, new_job: NewJob) -> None:
    pool = Pool(cluster, namespace, replicas=1)
    pool.until(readyReplicas=1)
    before = set(pool.sandboxes())
    gone, stays = (new_job(pooled(name, 1, seconds=40)).apply() for name in ("gone", "stays"))
    pool.until(used=4)
    gone.delete("--cascade=foreground")
    pool.until(used=2)
    stays.wait("Succeeded")
    assert [(one["outcome"], one["failedAttempts"]) for one in stays.results()] == [("Completed", [])] * 2
    pool.until(used=0)
    assert set(pool.sandboxes()) == before


@pytest.mark.full
def test_a_killed_runner_and_a_killed_pod_cost_attempts_alone(
    cluster: Cluster, namespace: str, new_job: NewJob
) -> None:
    pool = Pool(cluster, namespace, replicas=2)
    pool.until(readyReplicas=2)
    job = new_job(pooled("hurt", 3, seconds=20)).apply()
    pool.until(used=6)
    [runner] = job.pods("runner")
    cluster.kubectl("delete", "pod", runner["metadata"]["name"], "-n", namespace, "--grace-period=0", "--force")
    eventually(
        lambda: [one for one in job.pods("runner") if one["metadata"]["uid"] != runner["metadata"]["uid"]] or None, 90
    )
    victim = next(iter(pool.sandboxes()))
    cluster.kubectl("delete", "pod", victim, "-n", namespace, "--grace-period=0", "--force")
    job.wait("Succeeded")
    assert [(one["outcome"], one["reward"]) for one in job.results()] == [("Completed", 1.0)] * 6
    pool.until(readyReplicas=2, used=0)
    assert victim not in pool.sandboxes()


@pytest.mark.full
def test_a_pool_whose_image_does_not_exist_says_so_and_jobs_do_without(
    cluster: Cluster, namespace: str, new_job: NewJob
) -> None:
    pool = Pool(cluster, namespace)
    pool.body["spec"]["sandbox"]["image"] = "example.invalid/none:1"
    cluster.apply(pool.body)

    def reason() -> bool | None:
        conditions = pool.status.get("conditions", [])
        return any(one["reason"] in ("ImagePullBackOff", "ErrImagePull") for one in conditions) or None

    eventually(reason, 120, lambda: str(pool.status))
    job = new_job(pooled("other", 1)).apply()
    job.wait("Succeeded")
    assert job.sandboxes() or [one["outcome"] for one in job.results()] == ["Completed"] * 2


@pytest.mark.full
def test_new_sandboxes_of_a_pool_request_the_memory_that_workspaces_have_used(
    cluster: Cluster, namespace: str, new_job: NewJob
) -> None:
    resources = {"memory": "128Mi", "memoryRequest": "Measured"}
    sandbox = {"image": QUICKSTART_IMAGE, "perSandbox": 8, "resources": resources}
    pool = Pool(cluster, namespace, replicas=2, sandbox=sandbox)

    def job(name: str, tasks: int, seconds: float) -> Job:
        manifest = pooled(name, tasks, seconds, runners={"concurrency": 2 * tasks})
        manifest["spec"]["sandbox"]["resources"] = {"memory": "64Mi"}
        return new_job(manifest).apply()

    def requested(name: str) -> str:
        pod = cluster.get("pod", name, namespace)
        assert pod is not None
        return str(pod["spec"]["containers"][0]["resources"]["requests"]["memory"])

    pool.until(readyReplicas=2)
    before = set(pool.sandboxes())
    # 8 × 128 MiB and the executor's own.
    assert {requested(name) for name in before} == {"1120Mi"}
    # Its workspaces exist for more than 600 s in all.
    uses = job("uses", 8, 45)
    uses.wait("Succeeded")
    request = eventually(lambda: pool.status.get("memory", {}).get("request"), 60, lambda: str(pool.status))
    assert quantity_value(request) < quantity_value("64Mi")
    cluster.kubectl("scale", "sandboxpool/warm", "--replicas=3", "-n", namespace)
    pool.until(readyReplicas=3, draining=0)
    [new] = set(pool.sandboxes()) - before
    assert pool.sandboxes()[new]["spec"]["resources"]["memoryRequest"] == request
    assert quantity_value(requested(new)) < quantity_value("1120Mi")
    wide = cluster.kubectl("get", "sandboxpools", "-n", namespace, "-o", "wide").stdout.splitlines()
    assert dict(zip(wide[0].split(), wide[1].split(), strict=True))["MEMORY"] == request
    # Runners use it like the others.
    again = job("again", 12, 15)
    pool.until(used=24)
    again.wait("Succeeded")
    for each in (uses, again):
        assert {(one["outcome"], one["reward"]) for one in each.results()} == {("Completed", 1.0)}
        assert not each.sandboxes()
