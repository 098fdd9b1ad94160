"""The operator is never in the path of a rollout: running ones continue without it, and two operators never act at
once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

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
from tests.support.operators import operator_pods, scale
from tests.support.outages import Outages, Write

pytestmark = pytest.mark.alone


def is_up_again(cluster: Cluster, pod: str) -> bool:
    """Whether its container was restarted and runs."""
    found = cluster.get("pod", pod, OPERATOR_NAMESPACE)
    statuses = found["status"]["containerStatuses"] if found else []
    return any(status["restartCount"] and "running" in status["state"] for status in statuses)


@pytest.fixture(autouse=True)
def one_operator(cluster: Cluster) -> Iterator[None]:
    """Have one operator after the test."""
    yield
    scale(cluster, 1)


def assert_no_pod_twice(job: Job, writes: Sequence[Write]) -> None:
    """Check that each Sandbox got only one pod, and that no pod or Sandbox remains after the job's end."""
    created = Counter((write.resource, write.name) for write in writes if write.verb == "create" and write.name)
    twice = {what: count for what, count in created.items() if what[0] in ("pods", "sandboxes") and count > 1}
    assert not twice
    gone = lambda: not (job.pods("sandbox") or job.sandboxes()) or None  # noqa: E731
    eventually(gone, 60, job.describe)


@pytest.mark.full
def test_rollouts_continue_without_an_operator(
    cluster: Cluster, outages: Outages, new_job: Callable[[Object], Job]
) -> None:
    job = new_job(slow_quickstart(2, runners={"concurrency": 8})).apply()
    job.wait_stored(1)
    runners = [pod["metadata"]["uid"] for pod in job.pods("runner")]

    scale(cluster, 0)
    job.wait_stored(job.sealed() + 3)
    scale(cluster, 1)

    job.wait("Succeeded")
    assert [pod["metadata"]["uid"] for pod in job.pods("runner")] == runners
    assert_undisturbed(job)
    assert_no_pod_twice(job, outages.writes(job.namespace))


@pytest.mark.full
def test_of_two_operators_one_works_and_the_other_takes_over_when_it_is_killed(
    cluster: Cluster, outages: Outages, new_job: Callable[[Object], Job]
) -> None:
    scale(cluster, 2)
    operators = {pod["metadata"]["name"]: pod for pod in operator_pods(cluster)}
    job = new_job(slow_quickstart(1, runners={"concurrency": 4})).apply()
    job.wait_stored(1)

    (leader,) = {write.pod for write in outages.writes(job.namespace) if write.pod in operators}
    outages.kill(operators[leader])
    # After the second kill, Kubernetes waits 10 s before a restart. By then the other operator has seen no renewal of
    # the lease for longer than its term.
    eventually(lambda: is_up_again(cluster, leader) or None, 60, lambda: f"{leader} was not started again")
    outages.kill(operators[leader])
    job.wait("Succeeded")
    assert_undisturbed(job)

    writes = outages.writes(job.namespace)
    assert_no_pod_twice(job, writes)
    writers = [write.pod for write in writes if write.pod in operators]
    (other,) = operators.keys() - {leader}
    assert other in writers
    assert writers == sorted(writers, key=[leader, other].index), "the replicas' writes overlap in time"
