"""The operator's replicas: their number, and which of them leads."""

from tests.support.cluster import OPERATOR, OPERATOR_LABEL, OPERATOR_NAMESPACE, Cluster, Object, eventually


def operator_pods(cluster: Cluster) -> list[Object]:
    """Return those that are not being deleted."""
    pods = cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR_LABEL)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def leader(cluster: Cluster) -> str:
    """Return the name of the pod that leads, or led last."""
    lease = cluster.get("lease", "agent-rollouts", OPERATOR_NAMESPACE)
    assert lease is not None, "no operator has ever led"
    pod: str = lease["spec"]["holderIdentity"].rpartition("_")[0]
    return pod


def scale(cluster: Cluster, replicas: int) -> None:
    """Scale to this many operators, and wait until all are ready."""
    cluster.kubectl("scale", OPERATOR, "-n", OPERATOR_NAMESPACE, f"--replicas={replicas}")
    cluster.kubectl("rollout", "status", OPERATOR, "-n", OPERATOR_NAMESPACE, "--timeout=120s")
    there = lambda: len(cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR_LABEL)) == replicas or None  # noqa: E731
    eventually(there, 60, lambda: f"{OPERATOR} has not come to {replicas} pods")
