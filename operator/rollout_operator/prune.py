"""Reduce objects to the fields that the operator reads. 5,000 complete pods would take a hundred megabytes.

Tenants and their runners write parts of these objects. Parts that do not match the API's types are removed here, so that
readers of the cache can rely on the types. One tenant's malformed status must not stop the operator.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rollout_api.base import API_GROUP
from rollout_api.model_server import ModelServerStatus
from rollout_api.on_cluster.nodes import LABEL_PREFIX
from rollout_api.on_cluster.objects import EXCESS, Manifest, size_problem
from rollout_api.on_cluster.template import BUNDLE_VOLUME, without_nulls
from rollout_api.rollout_job import RolloutJobStatus, RunnerReport
from rollout_api.sandbox import SandboxStatus
from rollout_api.sandbox_pool import SandboxPoolStatus

_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences",
    "creationTimestamp", "deletionTimestamp",
)  # fmt: skip
_READ_KEYS = (f"{API_GROUP}/", "batch.kubernetes.io/", "kueue.x-k8s.io/")
"""Prefixes of the labels and annotations that the operator reads."""
_JOB_SPEC = ("suspend", "groupSize", "ttlSecondsAfterFinished", "security")
_CONTAINER_STATUS = ("name", "ready", "started", "restartCount", "state", "lastState")
_POD_STATUS = ("phase", "reason", "message", "podIP", "startTime", "conditions", "qosClass")
_STATUS: Mapping[str, type[BaseModel]] = {
    "Sandbox": SandboxStatus,
    "SandboxPool": SandboxPoolStatus,
    "RolloutJob": RolloutJobStatus,
    "ModelServer": ModelServerStatus,
    "RolloutShard": RunnerReport,
}
_LONGEST_SHARED = 64
"""Strings up to this length repeat (names, reasons, nodes, times) and are interned."""


def prune(kind: str, obj: Manifest) -> Manifest:
    """Return the parts of the object that the operator reads. The argument is not changed; equal strings are shared.

    Parts that a tenant made larger than any useful value are removed.
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
            kept |= {
                "spec": _pick(obj["spec"], "suspend", "completions", "parallelism"),
                "status": _within_limits(obj.get("status", {})),
            }
        case "StatefulSet" | "LeaderWorkerSet":
            kept |= {"spec": _pick(obj["spec"], "replicas"), "status": _within_limits(obj.get("status", {}))}
        case "NetworkPolicy" | "Service" | "PersistentVolumeClaim" | "PodDisruptionBudget" | "InferencePool":
            pass
        case "RolloutShard":
            kept["status"] = readable_status(kind, _within_limits(obj.get("status")))
        case "RolloutJob":
            kept |= _pick(obj, "apiVersion", "kind")
            kept |= {
                "spec": _job_spec(readable_spec(obj.get("spec"))),
                "status": readable_status(kind, obj.get("status")),
            }
            kept["metadata"].pop("annotations", None)
        case "Sandbox" | "SandboxPool" | "ModelServer":
            kept |= _pick(obj, "apiVersion", "kind")
            kept |= {"spec": readable_spec(obj.get("spec")), "status": readable_status(kind, obj.get("status"))}
            if why := size_problem(kept["spec"]):
                kept |= {"spec": {}, EXCESS: why}
    shared: Manifest = _share(kept)
    return shared


def readable_status(kind: str, status: Any) -> dict[str, Any]:
    """Return the fields and list entries of a status that match its API type; empty if it is not a mapping."""
    kept: dict[str, Any] = without_nulls(status) if isinstance(status, Mapping) else {}
    while kept:
        try:
            _STATUS[kind].model_validate(kept)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            unknown = {detail["loc"] for detail in details if detail["type"] == "extra_forbidden"}
            # Fields of a newer operator, which this one replaces after a failed upgrade. What has them stays.
            if unknown and (known := _without_paths(kept, unknown)) != kept:
                kept = known
                continue
            wrong = [detail["loc"] for detail in details]
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


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = _pick(metadata, *_METADATA)
    for field in ("labels", "annotations"):
        if field in kept and (field == "annotations" or size_problem(kept[field])):
            read = {key: value for key, value in kept[field].items() if key.startswith(_READ_KEYS)}
            kept[field] = _within_limits(read)
    owners = [owner for owner in kept.get("ownerReferences", ()) if owner.get("controller")]
    kept["ownerReferences"] = [] if size_problem(owners) else owners
    return kept


def _pick(source: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: source[key] for key in keys if key in source}


def _within_limits(value: Any) -> Any:
    """Return the value; an empty mapping if it is too large to keep."""
    return {} if size_problem(value) else value


def _pod_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    kept = _pick(spec, "nodeName", "hostUsers", "activeDeadlineSeconds")
    kept["volumes"] = [
        {"name": BUNDLE_VOLUME, "image": {}}
        for volume in spec.get("volumes", ())
        if volume["name"] == BUNDLE_VOLUME and "image" in volume
    ]
    return kept


def _pod_status(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = _pick(status, *_POD_STATUS)
    for field in ("containerStatuses", "initContainerStatuses"):
        if field in status:
            kept[field] = [_pick(container, *_CONTAINER_STATUS) for container in status[field]]
    return _within_limits(kept) or _pick(status, "phase")


def _node_status(status: Mapping[str, Any]) -> dict[str, Any]:
    ready = [
        _pick(condition, "type", "status", "reason", "lastTransitionTime")
        for condition in status.get("conditions", ())
        if condition["type"] == "Ready"
    ]
    info = _pick(status.get("nodeInfo", {}), "containerRuntimeVersion")
    return {"conditions": ready, "nodeInfo": info, **_pick(status, "runtimeHandlers")}


def _without(wrong: list[tuple[int | str, ...]], field: str, value: Any) -> Any:
    """Return a field's value without its invalid list entries; None if the value is invalid and not a list."""
    positions = {path[1] for path in wrong if len(path) > 1 and path[0] == field}
    if isinstance(value, list):
        return [entry for number, entry in enumerate(value) if number not in positions]
    return None if positions else value


def _without_paths(value: Any, paths: Collection[tuple[int | str, ...]], here: tuple[int | str, ...] = ()) -> Any:
    """Return the value without the entries of mappings at these paths."""
    if isinstance(value, Mapping):
        places = {key: (*here, key) for key in value}
        return {key: _without_paths(value[key], paths, at) for key, at in places.items() if at not in paths}
    if isinstance(value, list):
        return [_without_paths(entry, paths, (*here, number)) for number, entry in enumerate(value)]
    return value


def _job_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a job's spec that are needed while it runs. Its tasks can take a megabyte, so the start reads
    them again from the API server.
    """
    kept = _pick(spec, *_JOB_SPEC)
    template = _pick(spec.get("sandbox") or {}, "podTemplate")  # the plan of each of its Sandboxes reads it
    kept["sandbox"] = (
        {} if size_problem(template) else template
    )  # such a job never starts (rollout_api/on_cluster/resolve.py)
    kept["runners"] = _pick(spec.get("runners") or {}, "replicas")
    model = spec.get("model") or {}
    kept["model"] = _pick(model, "serverRef")
    if server := model.get("server"):
        kept["model"]["server"] = {"replicas": server.get("replicas", 1)}
    inline = (spec.get("tasks") or {}).get("inline") or ()
    kept["tasks"] = {"inline": [None] * len(inline)}  # Only their number counts.
    return kept


def readable_spec(spec: Any) -> dict[str, Any]:
    """Return the fields of a spec that are set; empty if it is not a mapping."""
    return {field: value for field, value in spec.items() if value is not None} if isinstance(spec, Mapping) else {}


def _share(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(key): _share(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_share(item) for item in value]
    if isinstance(value, str) and len(value) <= _LONGEST_SHARED:
        return sys.intern(value)
    return value
