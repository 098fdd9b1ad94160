"""A node with a runner and sandboxes fails, and the rest of the cluster takes over their work."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.cluster import Cluster, Job, Object, assert_rewards, eventually, slow_quickstart
from tests.support.outages import Outages
from tests.support.sandboxes import ByHand

pytestmark = [pytest.mark.alone, pytest.mark.full]


@contextlib.contextmanager
def cordoned(cluster: Cluster, node: str) -> Iterator[None]:
    """Let no new pods start on the node."""
    cluster.kubectl("cordon", node)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", node)


def on(node: str, pods: Sequence[Object]) -> Sequence[Object]:
    """Return those of the pods that run on a node."""
    return [pod for pod in pods if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running"]


def test_failed_node_with_one_of_three_runners_loses_no_result(
    cluster: Cluster, outages: Outages, new_job: Callable[[Object], Job]
) -> None:
    first = cluster.details["nodes"][0]["name"]
    second = outages.add_node()
    manifest = slow_quickstart(4, runners={"replicas": 3, "concurrency": 4})
    # Spreads sandboxes over both nodes where possible.
    manifest["spec"]["sandbox"]["podTemplate"] = {
        "spec": {
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"rollout.dev/job": "quickstart"}},
                }
            ]
        }
    }
    job = new_job(manifest)
    with cordoned(cluster, second):
        job.apply()
        eventually(lambda: len(on(first, job.pods("runner"))) == 3 or None, 120, job.describe)
    with cordoned(cluster, first):
        (moved,) = job.pods("runner")[2:]
        cluster.kubectl("delete", "pod", moved["metadata"]["name"], "-n", job.namespace, "--wait=false")
        eventually(lambda: on(second, job.pods("runner")) or None, 120, job.describe)
    eventually(lambda: on(second, job.pods("sandbox")) or None, 60, job.describe)

    # A job deletes a sandbox that does not answer, often before anybody knows why; one made by hand stays to be read.
    by_hand = ByHand(cluster, job.namespace, "by-hand")
    there = {"spec": {"nodeSelector": {"kubernetes.io/hostname": second}}}
    by_hand.apply(podTemplate=there, whenFinished="Retain").wait_ready()

    outages.kill_node(second)
    job.wait("Succeeded")
    results = assert_rewards(job)
    reasons = {failed["reason"] for result in results for failed in result["failedAttempts"]}
    assert "NodeLost" in reasons, "nothing was lost with the node"
    assert "SandboxLost" not in reasons, "a second loss of that kind would be the tool call's, and reward 0"
    finished = by_hand.wait_finished()
    assert (finished["reason"], second in finished["message"]) == ("NodeLost", True), finished
