"""The operator is never in the path of a rollout: without it running ones go on, and two of them never work at once."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.cluster import (
    OPERATOR_NAMESPACE,
    Cluster,
    Job,
    Object,
    assert_undisturbed,
    eventually,
    slow_quickstart,
)
from tests.support.outages import Outages, Write

DEPLOYMENT = "deployment/agent-rollouts"
OPERATOR = "app.kubernetes.io/name=agent-rollouts"


def operator_pods(cluster: Cluster) -> list[Object]:
    """Those that are not going."""
    pods = cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def scale(cluster: Cluster, replicas: int) -> None:
    """To so many operators, all ready."""
    cluster.kubectl("scale", DEPLOYMENT, "-n", OPERATOR_NAMESPACE, f"--replicas={replicas}")
    cluster.kubectl("rollout", "status", DEPLOYMENT, "-n", OPERATOR_NAMESPACE, "--timeout=120s")
    there = lambda: len(cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR)) == replicas or None  # noqa: E731
    eventually(there, 60, lambda: f"{DEPLOYMENT} has not come to {replicas} pods")


def has_restarted(cluster: Cluster) -> bool:
    """Whether an operator is ready whose container was started again in its pod."""
    statuses = [status for pod in operator_pods(cluster) for status in pod["status"]["containerStatuses"]]
    return any(status["ready"] and status["restartCount"] for status in statuses)


@pytest.fixture(autouse=True)
def one_operator(cluster: Cluster) -> Iterator[None]:
    """Whatever a test does, one operator is there after it."""
    yield
    scale(cluster, 1)


def assert_no_pod_twice(job: Job, writes: list[Write]) -> None:
    """Each Sandbox got one pod, ever; and with the job's end all pods and Sandboxes are gone."""
    created = Counter((write.resource, write.name) for write in writes if write.verb == "create")
    twice = {what: count for what, count in created.items() if what[0] in ("pods", "sandboxes") and count > 1}
    assert not twice
    gone = lambda: not (job.pods("sandbox") or job.sandboxes()) or None  # noqa: E731
    eventually(gone, 60, job.describe)


def test_rollouts_go_on_while_the_operator_is_killed_and_away(
    cluster: Cluster, outages: Outages, new_job: Callable[[Object], Job]
) -> None:
    job = new_job(slow_quickstart(3, runners={"concurrency": 8})).apply()
    eventually(lambda: job.sealed() >= 1 or None, 120, job.describe)
    runners = [pod["metadata"]["uid"] for pod in job.pods("runner")]

    (operator,) = operator_pods(cluster)
    outages.kill(operator)
    eventually(lambda: has_restarted(cluster) or None, 60, lambda: "the operator's container was not started again")
    scale(cluster, 0)
    before = job.sealed()
    eventually(lambda: job.sealed() >= before + 3 or None, 120, job.describe)
    scale(cluster, 1)

    job.wait("Succeeded")
    assert [pod["metadata"]["uid"] for pod in job.pods("runner")] == runners
    assert_undisturbed(job)
    assert_no_pod_twice(job, list(outages.writes(job.namespace)))


def test_of_two_operators_one_works_and_the_other_takes_over_when_it_is_killed(
    cluster: Cluster, outages: Outages, new_job: Callable[[Object], Job]
) -> None:
    scale(cluster, 2)
    operators = {pod["metadata"]["name"]: pod for pod in operator_pods(cluster)}
    # Two sandboxes for six groups of short-lived pods: both replicas would have something to write at all times.
    job = new_job(slow_quickstart(3, runners={"concurrency": 4})).apply()
    eventually(lambda: job.sealed() >= 1 or None, 120, job.describe)

    first = {write.pod for write in outages.writes(job.namespace) if write.pod in operators}
    assert len(first) == 1, "both replicas wrote while both were there"
    (leader,) = first
    outages.kill(operators[leader])
    job.wait("Succeeded")
    assert_undisturbed(job)

    writes = outages.writes(job.namespace)
    assert_no_pod_twice(job, list(writes))
    turns = [write.pod for write in writes if write.pod in operators]
    (other,) = operators.keys() - {leader}
    assert turns == sorted(turns, key=[leader, other].index), "the replicas' writes overlap in time"
    assert other in turns
