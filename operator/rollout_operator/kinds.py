"""The kinds that the operator watches, with their label selectors, and helpers for NetworkPolicies."""

from rollout_api.cluster import MANAGED_BY, ROLE_LABEL, SANDBOX_ROLE
from rollout_api.on_cluster.objects import Json

MANAGED_SELECTOR = ",".join(f"{label}={value}" for label, value in MANAGED_BY.items())
"""Label selector of the objects that the operator creates, so that the API server sends no other pods."""


OWNED = (
    *("Pod", "Job", "NetworkPolicy", "RolloutShard"),
    *("StatefulSet", "LeaderWorkerSet", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"),
)
WATCHED = {"Sandbox": "", "RolloutJob": "", "ModelServer": "", "Node": ""} | dict.fromkeys(OWNED, MANAGED_SELECTOR)
"""Kinds in the cache, with the label selector of each watch."""

OPTIONAL = frozenset({"Node", "LeaderWorkerSet"})
"""Kinds that may be unavailable. An operator limited to some namespaces may lack the right to read cluster-scoped
kinds. LeaderWorkerSet is an optional addition that only multi-node servers need.
"""

NOT_SANDBOX: Json = {"key": ROLE_LABEL, "operator": "NotIn", "values": [SANDBOX_ROLE]}
"""Label selector requirement that excludes sandboxes and includes pods without the label."""

_ADMISSION_PHRASES = ("violates PodSecurity", "denied the request", "denied request", "unable to validate against any")
"""Phrases in refusals of Pod Security, webhooks, ValidatingAdmissionPolicies and OpenShift's constraints."""


def is_by_admission(message: str) -> bool:
    """Whether an API server's message says that admission refused an object. Labels and policies may change later."""
    return any(phrase in message for phrase in _ADMISSION_PHRASES)


def tcp(port: int) -> Json:
    return {"protocol": "TCP", "port": port}
