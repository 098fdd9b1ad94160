"""The kinds that the operator reads or writes: where they are, and the form of objects with an owner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_api.base import API_VERSION
from rollout_api.cluster import MANAGED_BY, ROLE_LABEL, SANDBOX_ROLE

Json = dict[str, Any]

OURS = ",".join(f"{label}={value}" for label, value in MANAGED_BY.items())
"""Label selector of what the operator made itself: the API server sends nobody else's pods."""


@dataclass(frozen=True)
class Kind:
    """One kind's place in the API."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of one object, of all in a namespace, or of all."""
        parts = ["/api" if self.api_version == "v1" else "/apis", self.api_version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/".join(part for part in parts if part)


KINDS = {
    "Sandbox": Kind(API_VERSION, "sandboxes"),
    "RolloutJob": Kind(API_VERSION, "rolloutjobs"),
    "ModelServer": Kind(API_VERSION, "modelservers"),
    "RolloutShard": Kind(API_VERSION, "rolloutshards"),
    "Pod": Kind("v1", "pods"),
    "Node": Kind("v1", "nodes", namespaced=False),
    "Job": Kind("batch/v1", "jobs"),
    "StatefulSet": Kind("apps/v1", "statefulsets"),
    "LeaderWorkerSet": Kind("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "Service": Kind("v1", "services"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "Secret": Kind("v1", "secrets"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "Event": Kind("v1", "events"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
}

OWNED = (
    *("Pod", "Job", "NetworkPolicy", "RolloutShard"),
    *("StatefulSet", "LeaderWorkerSet", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"),
)
WATCHED = {"Sandbox": "", "RolloutJob": "", "ModelServer": "", "Node": ""} | dict.fromkeys(OWNED, OURS)
"""Kinds that the cache holds, with the label selector of each watch."""

OPTIONAL = frozenset({"Node", "LeaderWorkerSet"})
"""An operator that was given some namespaces only may have no right to read what is outside of them; LeaderWorkerSet is an
addition that a cluster may lack, and only servers of several nodes need."""

NOT_SANDBOX: Json = {"key": ROLE_LABEL, "operator": "NotIn", "values": [SANDBOX_ROLE]}
"""Requirement of a label selector: pods that are not sandboxes, those without the label included."""

_WORDS = ("violates PodSecurity", "denied the request", "denied request", "unable to validate against any")
"""Of Pod Security, webhooks, ValidatingAdmissionPolicies, OpenShift's constraints."""


def is_by_admission(message: str) -> bool:
    """Whether an API server's message says that admission refused an object: labels and policies may change."""
    return any(words in message for words in _WORDS)


def owner_reference(kind: str, name: str, uid: str | None) -> Json:
    """Reference by which garbage collection deletes an object with its owner, whose deletion never waits for it."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def owned_object(
    kind: str, name: str, namespace: str | None, owner: Json, labels: Mapping[str, str], **body: Any
) -> Json:
    """An object with a controller. `body`: its fields beside the metadata."""
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels), "ownerReferences": [owner]}
    return {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": metadata, **body}


def tcp(port: int) -> Json:
    return {"protocol": "TCP", "port": port}
