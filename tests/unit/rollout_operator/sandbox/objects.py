"""Sandboxes, pods and nodes as the API server has them, for the tests of this folder."""

from datetime import UTC, datetime, timedelta
from typing import Any

from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator.cache import Cache
from rollout_operator.conditions import timestamp
from rollout_operator.prune import prune
from rollout_operator.world import Memory, World

Json = dict[str, Any]

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
NAMESPACE = "lab"
KEY = "5a" * 32
CONFIG = OperatorConfig.model_validate(
    {
        "images": {"runtime": "runtime:1", "executor": "executor:1"},
        "lease": {"namespace": "operators"},
        "privilegedNamespaces": ["trusted"],
    }
)


def sandbox(name: str = "s", *, job: str | None = None, namespace: str = NAMESPACE, **spec: Any) -> Json:
    """Return a Sandbox that was created at NOW."""
    metadata: Json = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": timestamp(NOW),
    }
    if job:
        metadata["ownerReferences"] = [{"kind": "RolloutJob", "name": job, "uid": f"uid-{job}", "controller": True}]
    return {"kind": "Sandbox", "metadata": metadata, "spec": {"image": "busybox:1", **spec}}


def rollout_job(name: str = "j", *, namespace: str = NAMESPACE, template: Json | None = None, **spec: Any) -> Json:
    """Return the part of a RolloutJob that its Sandboxes need."""
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
    return {"kind": "RolloutJob", "metadata": metadata, "spec": {"sandbox": {"podTemplate": template}, **spec}}


def node(
    name: str = "n1",
    *,
    user_namespaces: bool = True,
    ready: bool = True,
    runtime: str = "containerd://2.1.0",
    labels: dict[str, str] | None = None,
    since: datetime = NOW,
    handlers: dict[str, bool] | None = None,
) -> Json:
    """Return a node. `since`: when it became ready, or was last seen; `handlers`: which runtime handlers have user
    namespaces.
    """
    reported = {"": user_namespaces} if handlers is None else handlers
    condition = {"type": "Ready", "status": "True" if ready else "Unknown", "lastTransitionTime": timestamp(since)}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {},
        "status": {
            "conditions": [condition],
            "runtimeHandlers": [{"name": name, "features": {"userNamespaces": has}} for name, has in reported.items()],
            "nodeInfo": {"containerRuntimeVersion": runtime},
        },
    }


def policy(name: str = "s") -> Json:
    """Return the NetworkPolicy of a Sandbox that a person created."""
    owner = {"kind": "Sandbox", "name": name, "uid": f"uid-{name}", "controller": True}
    return {
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{name}-sandbox", "namespace": NAMESPACE, "ownerReferences": [owner]},
    }


def pod(
    state: Json | None = None, *, name: str = "s", overlay: bool = True, node_name: str = "n1", **status: Any
) -> Json:
    """Return a pod of Sandbox `name` whose container is in `state`."""
    container = [{"name": "sandbox", "state": state}] if state is not None else []
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-pod-{name}",
            "creationTimestamp": timestamp(NOW),
            "ownerReferences": [{"kind": "Sandbox", "name": name, "uid": f"uid-{name}", "controller": True}],
        },
        "spec": {"nodeName": node_name, "volumes": [], **({"hostUsers": False} if overlay else {})},
        "status": {"phase": "Pending", "containerStatuses": container, **status},
    }


def waiting(reason: str, message: str = "") -> Json:
    """Return the state of a waiting container."""
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, reason: str = "Error", message: str = "", lived: float = 1.0, **more: Any) -> Json:
    """Return the state of a container that ended `lived` seconds after its start."""
    times = {"startedAt": timestamp(NOW), "finishedAt": timestamp(NOW + timedelta(seconds=lived))}
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, **times, **more}}


RUNNING: Json = {"running": {"startedAt": timestamp(NOW)}}


def disrupted(reason: str, message: str = "") -> list[Json]:
    """Return the conditions of a pod that Kubernetes itself ends."""
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}]


def world(
    *objects: Json, now: datetime = NOW, keys: dict[str, str] | None = None, memory: Memory | None = None
) -> World:
    """Return a world with these objects in its cache, pruned as by the operator. All keys are known unless others are
    given.
    """
    cache = Cache()
    for each in objects:
        kind = each.get("kind", "Node")
        cache.put(kind, prune(kind, each))
    known = dict.fromkeys(("uid-s", "uid-j"), KEY) if keys is None else keys
    return World(cache, CONFIG, now, memory or Memory(), known)
