"""Keep of each object what somebody reads: 5,000 pods as the API server sends them would take a hundred megabytes.

Tenants and their runners write parts of these objects. Whatever does not have the form of the contract is left out here, so
that everything behind the cache may rely on it: one tenant's malformed status must not stop the operator for all.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rollout_api.base import API_GROUP
from rollout_api.model_server import ModelServerStatus
from rollout_api.nesting import DEEPEST, too_deep
from rollout_api.rollout_job import RolloutJobStatus, RunnerReport
from rollout_api.sandbox import SandboxStatus
from rollout_operator.actions import Manifest
from rollout_operator.nodes import LABEL_PREFIX

_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences",
    "creationTimestamp", "deletionTimestamp",
)  # fmt: skip
_READ_KEYS = (f"{API_GROUP}/", "batch.kubernetes.io/", "kueue.x-k8s.io/")
"""Beginnings of the labels and annotations that somebody reads."""
_JOB_SPEC = ("suspend", "groupSize", "ttlSecondsAfterFinished", "security")
_CONTAINER_STATUS = ("name", "ready", "started", "restartCount", "state", "lastState")
_POD_STATUS = ("phase", "reason", "message", "podIP", "startTime", "conditions", "qosClass")
EXCESS = "excess"
"""Field of an object whose spec was too large to be kept: why."""
_STATUS: Mapping[str, type[BaseModel]] = {
    "Sandbox": SandboxStatus,
    "RolloutJob": RolloutJobStatus,
    "ModelServer": ModelServerStatus,
    "RolloutShard": RunnerReport,
}
MOST_CHARACTERS = 65_536
"""Of a spec that is kept whole. Hundreds of one tenant's objects of a megabyte each would fill the operator's memory."""
_LONGEST_SHARED = 64
"""Strings up to this length repeat (names, reasons, nodes, times) and are kept once."""


def prune(kind: str, obj: Manifest) -> Manifest:
    """The object, or the part of it that is worth its memory. Never the one that was given: equal strings are shared.

    Whatever a tenant can make long is left out when it is longer than any that serves a purpose.
    """
    kept: dict[str, Any] = {"metadata": _metadata(obj["metadata"])}
    match kind:
        case "Pod":
            kept |= {"spec": _pod_spec(obj["spec"]), "status": _pod_status(obj.get("status", {}))}
        case "Node":
            kept |= {"spec": {}, "status": _node_status(obj["status"])}
            labels = kept["metadata"].pop("labels", {})
            kept["metadata"]["labels"] = {key: labels[key] for key in labels if key.startswith(LABEL_PREFIX)}
            kept["metadata"].pop("annotations", None)
        case "Job":
            kept |= {"spec": _pick(obj["spec"], "suspend"), "status": obj.get("status", {})}
        case "StatefulSet" | "LeaderWorkerSet":
            kept |= {"spec": _pick(obj["spec"], "replicas"), "status": obj.get("status", {})}
        case "NetworkPolicy" | "Service" | "PersistentVolumeClaim" | "PodDisruptionBudget":
            pass
        case "RolloutShard":
            status = obj.get("status")
            kept["status"] = {} if excess(status) else readable_status(kind, status)
        case "RolloutJob":
            kept |= _pick(obj, "apiVersion", "kind")
            kept |= {
                "spec": _job_spec(readable_spec(obj.get("spec"))),
                "status": readable_status(kind, obj.get("status")),
            }
            kept["metadata"].pop("annotations", None)
        case "Sandbox" | "ModelServer":
            kept |= _pick(obj, "apiVersion", "kind")
            kept |= {"spec": readable_spec(obj.get("spec")), "status": readable_status(kind, obj.get("status"))}
            if why := excess(kept["spec"]):
                kept |= {"spec": {}, EXCESS: why}
    shared: Manifest = _share(kept)
    return shared


def readable_status(kind: str, status: Any) -> dict[str, Any]:
    """The fields and list entries of a status that the contract accepts; empty for anything but a mapping."""
    kept: dict[str, Any] = _without_nulls(status) if isinstance(status, Mapping) else {}
    while kept:
        try:
            _STATUS[kind].model_validate(kept)
        except ValidationError as error:
            wrong = [detail["loc"] for detail in error.errors(include_url=False, include_context=False)]
            fields = {path[0] for path in wrong if path}
            before, kept = (
                kept,
                {field: _without(wrong, field, value) for field, value in kept.items() if (field,) not in wrong},
            )
            kept = {field: value for field, value in kept.items() if field not in fields or value}
            if kept == before:
                return {}
        else:
            break
    return kept


def excess(value: Any) -> str | None:
    """Why a value is too large to be kept and planned with; None for what people write."""
    if too_deep(value):
        return f"is nested more than {DEEPEST} levels deep; nothing in a manifest has to be"
    if (size := len(json.dumps(value))) > MOST_CHARACTERS:
        return f"has {size} characters as JSON, expected at most {MOST_CHARACTERS}; make it smaller"
    return None


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = _pick(metadata, *_METADATA)
    for field in ("labels", "annotations"):
        if field in kept and (field == "annotations" or excess(kept[field])):
            kept[field] = {key: value for key, value in kept[field].items() if key.startswith(_READ_KEYS)}
    owners = [owner for owner in kept.get("ownerReferences", ()) if owner.get("controller")]
    kept["ownerReferences"] = [] if excess(owners) else owners
    return kept


def _pick(source: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: source[key] for key in keys if key in source}


def _pod_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    kept = _pick(spec, "nodeName", "hostUsers", "activeDeadlineSeconds")
    kept["volumes"] = [{"name": volume["name"], "image": {}} for volume in spec.get("volumes", ()) if "image" in volume]
    return kept


def _pod_status(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = _pick(status, *_POD_STATUS)
    for field in ("containerStatuses", "initContainerStatuses"):
        if field in status:
            kept[field] = [_pick(container, *_CONTAINER_STATUS) for container in status[field]]
    return kept


def _node_status(status: Mapping[str, Any]) -> dict[str, Any]:
    ready = [
        _pick(condition, "type", "status", "reason", "lastTransitionTime")
        for condition in status.get("conditions", ())
        if condition["type"] == "Ready"
    ]
    info = _pick(status.get("nodeInfo", {}), "containerRuntimeVersion")
    return {"conditions": ready, "nodeInfo": info, **_pick(status, "runtimeHandlers")}


def _without(wrong: list[tuple[int | str, ...]], field: str, value: Any) -> Any:
    """The value of a field without the list entries that are wrong; nothing when it is no list and is wrong."""
    positions = {path[1] for path in wrong if len(path) > 1 and path[0] == field}
    if isinstance(value, list):
        return [entry for number, entry in enumerate(value) if number not in positions]
    return None if positions else value


def _job_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What is looked at while a job runs: its tasks alone may take a megabyte, and are read anew to start it."""
    kept = _pick(spec, *_JOB_SPEC)
    template = _pick(spec.get("sandbox") or {}, "podTemplate")  # of every pod of its sandboxes
    kept["sandbox"] = {} if excess(template) else template  # such a job never starts (rollout_job/resolve.py)
    kept["runners"] = _pick(spec.get("runners") or {}, "replicas")
    model = spec.get("model") or {}
    kept["model"] = _pick(model, "serverRef")
    if server := model.get("server"):
        kept["model"]["server"] = {"replicas": server.get("replicas", 1)}
    inline = (spec.get("tasks") or {}).get("inline") or ()
    kept["tasks"] = {"inline": [None] * len(inline)}  # Only their number counts.
    return kept


def readable_spec(spec: Any) -> dict[str, Any]:
    """The fields of a spec that are set; empty for anything but a mapping."""
    return {field: value for field, value in spec.items() if value is not None} if isinstance(spec, Mapping) else {}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value if inner is not None]
    return value


def _share(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(key): _share(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_share(item) for item in value]
    if isinstance(value, str) and len(value) <= _LONGEST_SHARED:
        return sys.intern(value)
    return value
