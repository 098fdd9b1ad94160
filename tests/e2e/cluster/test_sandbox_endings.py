"""Sandboxes that a real kubelet, scheduler and kernel end: each reports the true reason."""

import json
from collections.abc import Iterator

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Object, eventually
from tests.support.sandboxes import ByHand


def ending(sandbox: ByHand) -> Object:
    """Return its condition Finished, which can be read after its pod is gone."""
    finished = sandbox.wait_finished()
    pod_is_gone = lambda: sandbox.cluster.get("pod", sandbox.name, sandbox.namespace) is None or None  # noqa: E731
    eventually(pod_is_gone, 60, sandbox.describe)
    assert sandbox.condition("Ready")["reason"] == finished["reason"]
    return finished


def test_unused_sandbox_ends_itself_and_a_used_one_at_its_lifetime(cluster: Cluster, namespace: str) -> None:
    clocks = {"idle": {"idleSeconds": 2}, "hard": {"lifetimeSeconds": 8}, "neither": {}}
    sandboxes = {name: ByHand(cluster, namespace, name) for name in clocks}
    for name, sandbox in sandboxes.items():
        sandbox.apply(**clocks[name], whenFinished="Retain")
    sandboxes["hard"].wait_ready()
    assert sandboxes["hard"].run_in_container("sleep", "100").returncode != 0, "it was to be ended while something runs"

    reasons = {name: ending(sandboxes[name])["reason"] for name in ("idle", "hard")}
    assert reasons == {"idle": "Idle", "hard": "DeadlineExceeded"}
    assert "spec.idleSeconds" in sandboxes["idle"].condition("Finished")["message"]
    assert "spec.lifetimeSeconds" in sandboxes["hard"].condition("Finished")["message"]
    sandboxes["neither"].wait_ready().assert_unharmed()


def test_sandbox_killed_for_its_memory_reports_that(cluster: Cluster, namespace: str) -> None:
    # Files in memory stay when the process that wrote them is killed, and the executor does not watch volumes. So in the
    # end the executor is the only process that the kernel can kill.
    sandbox = ByHand(cluster, namespace, "hungry")
    sandbox.apply(
        resources={"memory": "32Mi"},
        workspaces={"mode": "Plain"},
        podTemplate={
            "spec": {
                "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
                "containers": [{"name": "sandbox", "volumeMounts": [{"name": "memory", "mountPath": "/memory"}]}],
            }
        },
        whenFinished="Retain",
    )
    sandbox.wait_ready()
    fill = "while true; do head -c 16M /dev/zero >> /memory/file; done"

    def filled() -> Object | None:
        # The kernel may end the shell before the executor, and a slow machine fills less within the command's time.
        assert sandbox.try_to_run("sh", "-c", fill).returncode != 0
        return sandbox.condition("Finished") or None

    eventually(filled, 120, sandbox.describe)
    finished = ending(sandbox)
    assert (finished["reason"], "its pod's memory limit" in finished["message"]) == ("OOMKilled", True)


@pytest.fixture
def seat(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Create a resource that exists once in the cluster, and a priority with which a pod may preempt another."""
    name = f"rollout.test/{namespace}"
    node = next(node["metadata"]["name"] for node in cluster.list("nodes", "") if not node["spec"].get("taints"))

    def offer(count: str | None) -> None:
        status = {"status": {kind: {name: count} for kind in ("capacity", "allocatable")}}
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(status))

    cluster.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}, "value": 1000}
    )
    offer("1")
    yield name
    offer(None)
    cluster.kubectl("delete", "priorityclass", namespace)


@pytest.mark.full
def test_preempted_sandbox_has_the_reason_preempted(cluster: Cluster, namespace: str, seat: str) -> None:
    resources = {"requests": {seat: "1"}, "limits": {seat: "1"}}
    sandbox = ByHand(cluster, namespace, "cheap")
    sandbox.apply(
        podTemplate={"spec": {"containers": [{"name": "sandbox", "resources": resources}]}}, whenFinished="Retain"
    )
    sandbox.wait_ready()
    important = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "important", "namespace": namespace},
        "spec": {
            "priorityClassName": namespace,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {"name": "main", "image": QUICKSTART_IMAGE, "command": ["sleep", "1000"], "resources": resources}
            ],
        },
    }
    cluster.apply(important)
    finished = ending(sandbox)
    assert (finished["reason"], "preempting" in finished["message"]) == ("Preempted", True), finished
    cluster.kubectl("wait", "--for=condition=Ready", "pod/important", "-n", namespace, "--timeout=60s")
