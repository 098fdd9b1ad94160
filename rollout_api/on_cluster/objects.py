"""Kubernetes objects as JSON: the API paths of their kinds, objects with an owner, and size limits for specs, so that
objects of tenants cannot exhaust the operator's memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_api.base import API_VERSION
from rollout_api.nesting import DEEPEST, too_deep

Json = dict[str, Any]

Manifest = Mapping[str, Any]
"""A Kubernetes object that is only read."""


@dataclass(frozen=True)
class Kind:
    """API version, plural name and scope of one kind."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of one object, of all objects in a namespace, or of all objects."""
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
    "SandboxPool": Kind(API_VERSION, "sandboxpools"),
    "Pod": Kind("v1", "pods"),
    "Node": Kind("v1", "nodes", namespaced=False),
    "Job": Kind("batch/v1", "jobs"),
    "StatefulSet": Kind("apps/v1", "statefulsets"),
    "LeaderWorkerSet": Kind("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "InferencePool": Kind("inference.networking.k8s.io/v1", "inferencepools"),
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


def owner_reference(kind: str, name: str, uid: str | None) -> Json:
    """Return an owner reference. The object is garbage-collected with its owner and does not block its deletion."""
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
    """Return an object whose controller is `owner`. `body` has its fields besides the metadata."""
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels), "ownerReferences": [owner]}
    return {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": metadata, **body}


EXCESS = "excess"
"""Field that the operator's cache adds to an object whose spec was too large to keep. Its value is the reason."""
TOO_DEEP = f"is nested more than {DEEPEST} levels deep; no field of a manifest needs that many"
"""Message for a value that `too_deep` rejects."""
MOST_CHARACTERS = 65_536
"""Longest spec, as JSON, that the operator keeps. Hundreds of objects of a megabyte each would fill its memory."""


def size_problem(value: Any) -> str | None:
    """Return why a value is too large to keep; None if it is within the limits."""
    if too_deep(value):
        return TOO_DEEP
    if (size := len(json.dumps(value))) > MOST_CHARACTERS:
        return f"has {size} characters as JSON, expected at most {MOST_CHARACTERS}; make it smaller"
    return None
