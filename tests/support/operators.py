"""The operator's replicas: how many there are, and which of them works."""

from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Object, eventually

NAME = "agent-rollouts"
"""Of its Deployment and of its Lease."""
DEPLOYMENT = f"deployment/{NAME}"
SELECTOR = f"app.kubernetes.io/name={NAME}"


def operator_pods(cluster: Cluster) -> list[Object]:
    """Those that are not going."""
    pods = cluster.list("pods", OPERATOR_NAMESPACE, SELECTOR)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def leader(cluster: Cluster) -> str:
    """Name of the pod that works, or worked last."""
    lease = cluster.get("lease", NAME, OPERATOR_NAMESPACE)
    assert lease is not None, "no operator has ever led"
    pod: str = lease["spec"]["holderIdentity"].rpartition("_")[0]
    return pod


def scale(cluster: Cluster, replicas: int) -> None:
    """To so many operators, all ready."""
    cluster.kubectl("scale", DEPLOYMENT, "-n", OPERATOR_NAMESPACE, f"--replicas={replicas}")
    cluster.kubectl("rollout", "status", DEPLOYMENT, "-n", OPERATOR_NAMESPACE, "--timeout=120s")
    there = lambda: len(cluster.list("pods", OPERATOR_NAMESPACE, SELECTOR)) == replicas or None  # noqa: E731
    eventually(there, 60, lambda: f"{DEPLOYMENT} has not come to {replicas} pods")
