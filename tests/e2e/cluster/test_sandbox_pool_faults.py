"""SandboxPools while a node fails, the operator is away or is replaced, and sandboxes become too old or too large."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.cluster import OPERATOR_NAMESPACE, QUICKSTART_IMAGE, Cluster, Job, Object, eventually, small_job
from tests.support.operators import leader, scale
from tests.support.outages import Outages
from tests.support.pools import Pool, pooled

pytestmark = [pytest.mark.alone, pytest.mark.full]

NewJob = Callable[[Object], Job]
SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app": "warm"}},
}


@pytest.fixture(autouse=True)
def one_operator(cluster: Cluster) -> Iterator[None]:
    """Have one operator after the test."""
    yield
    scale(cluster, 1)


def all_completed(job: Job, count: int) -> None:
    assert [(one["outcome"], one["reward"]) for one in job.results()] == [("Completed", 1.0)] * count


def test_failed_node_costs_a_pool_attempts_alone(
    cluster: Cluster, outages: Outages, namespace: str, new_job: NewJob
) -> None:
    first = cluster.details["nodes"][0]["name"]
    second = outages.add_node()
    pool = Pool(cluster, namespace, replicas=2)
    pool.body["spec"]["sandbox"]["podTemplate"] = {
        "metadata": {"labels": {"app": "warm"}},
        "spec": {"topologySpreadConstraints": [SPREAD]},
    }
    cluster.apply(pool.body)
    pool.until(readyReplicas=2, draining=0)
    pods = cluster.list("pods", namespace, "app=warm")
    assert {pod["spec"]["nodeName"] for pod in pods} == {first, second}, "the pool is not spread"
    [there] = [pod["metadata"]["name"] for pod in pods if pod["spec"]["nodeName"] == second]
    cluster.kubectl("cordon", second)
    job = new_job(pooled("hurt", 4, seconds=40)).apply()
    pool.until(used=8)
    outages.kill_node(second)
    job.wait("Succeeded")
    all_completed(job, 8)
    reasons = {failed["reason"] for result in job.results() for failed in result["failedAttempts"]}
    assert reasons == {"NodeLost"}, reasons
    eventually(lambda: there not in pool.sandboxes() or None, 120, lambda: str(pool.sandboxes()))


def test_jobs_use_a_pool_without_an_operator_and_two_of_them_keep_its_size(
    cluster: Cluster, namespace: str, new_job: NewJob
) -> None:
    pool = Pool(cluster, namespace, replicas=1, maxReplicas=3, idleSeconds=3)
    pool.until(readyReplicas=1)
    job = new_job(pooled("waits", 6, seconds=10, runners={"concurrency": 12})).apply()
    pool.until(used=4)
    scale(cluster, 0)
    # Only one of its three sandboxes may be ready now, and all rollouts pass through what there is.
    job.wait_stored(8)
    scale(cluster, 2)
    job.wait("Succeeded")
    all_completed(job, 12)
    assert not any(result["failedAttempts"] for result in job.results())
    another = new_job(pooled("more", 6, seconds=10, runners={"concurrency": 12})).apply()
    most = 0

    def is_done() -> bool | None:
        nonlocal most
        most = max(most, len(pool.sandboxes()))
        if most >= 2 and not killed:
            killed.append(leader(cluster))
            cluster.kubectl("delete", "pod", killed[0], "-n", OPERATOR_NAMESPACE, "--wait=false")
        return another.sealed() == 12 or None

    killed: list[str] = []
    eventually(is_done, 300, another.describe)
    assert killed, "the pool has not grown"
    another.wait("Succeeded")
    all_completed(another, 12)
    assert most <= 3, "two operators made more sandboxes than the pool may have"
    pool.until(readyReplicas=1, draining=0, used=0)


@pytest.mark.parametrize("recycle", [{"ageSeconds": 60}, {"uses": 4}, {"disk": "30Mi"}], ids=["age", "uses", "disk"])
def test_sandboxes_are_replaced_under_running_rollouts(
    cluster: Cluster, namespace: str, new_job: NewJob, recycle: Object
) -> None:
    pool = Pool(cluster, namespace, replicas=1, recycle=recycle)
    pool.until(readyReplicas=1)
    before = set(pool.sandboxes())
    manifest = pooled("writes", 3, seconds=30, runners={"concurrency": 4})
    for task in manifest["spec"]["tasks"]["inline"]:
        task["solution"] = ["head -c 40000000 /dev/zero > big; sleep 30; rm big; touch solved"]
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    all_completed(job, 6)
    assert not any(result["failedAttempts"] for result in job.results())
    eventually(lambda: not before & set(pool.sandboxes()) or None, 120, lambda: str(pool.sandboxes()))
    pool.until(readyReplicas=1, used=0)


def test_dockerfiles_of_tasks_are_built_in_a_pool(cluster: Cluster, namespace: str, new_job: NewJob) -> None:
    pool = Pool(cluster, namespace, replicas=2)
    pool.until(readyReplicas=2)
    manifest = small_job("built", agent={"type": "Oracle"}, groupSize=2)
    tasks: list[Object] = [
        {
            "name": f"t{number}",
            "prompt": "Do nothing.",
            "dockerfile": {
                "text": "FROM python:3.12\nRUN date +%N > /common\nCOPY own /own/\nUSER 1000\n",
                "context": [{"path": "own", "content": f"t{number}"}],
            },
            "solution": ["true"],
            "verifier": {"commands": [f"grep -qx t{number} /own/own && test -s /common"]},
        }
        for number in range(4)
    ]
    manifest["spec"]["tasks"] = {"inline": tasks, "dockerfiles": {"bases": {"python:3.12": QUICKSTART_IMAGE}}}
    manifest["spec"].pop("model", None)
    manifest["spec"]["sandbox"] = {"workspaces": {"mode": "Overlay"}}
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    all_completed(job, 8)
    assert not job.sandboxes()
    pool.until(used=0)
