"""Interpret a pod's status: whether it runs, what it waits for, why it has ended. No side effects."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from rollout_api.conditions import true_conditions
from rollout_api.on_cluster import nodes
from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.template import BUNDLE_VOLUME, CONTAINER
from rollout_operator.conditions import disruption, parse_time

SCHEDULED, IMAGE_PULLED, OVERLAY, PARKED = "Scheduled", "ImagePulled", "Overlay", "Parked"
READY, FINISHED = "Ready", "Finished"
ORDER = (SCHEDULED, IMAGE_PULLED, OVERLAY, PARKED, READY, FINISHED)
"""Conditions of a Sandbox in the order in which they are written."""
TRIAL_FAILED_EXIT = 3
"""Exit code of an executor whose Overlay trial failed before it served a request (docs/executor.md)."""
LONGEST_TRIAL = timedelta(seconds=60)
"""Longest run of an executor that counts as a failed trial. A trial takes a tenth of a second, or longer on a busy node. An
executor that ran longer may have served workspaces.
"""
NODE_GRACE = timedelta(seconds=30)
"""Time after which pods on a node that is not ready count as lost. Sandbox pods tolerate the node's taints for this time."""
SCHEDULER_GRACE = timedelta(seconds=60)
"""Time after which an unscheduled pod is reported. A scheduler with thousands of waiting pods needs some time for each."""


class FinishedReason(StrEnum):
    """Reasons of the condition Finished."""

    IDLE = "Idle"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
    OOM_KILLED = "OOMKilled"
    STORAGE_EXCEEDED = "StorageExceeded"
    DISK_EXHAUSTED = "DiskExhausted"
    INODES_EXHAUSTED = "InodesExhausted"
    PROCESSES_EXHAUSTED = "ProcessesExhausted"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    POD_DELETED = "PodDeleted"
    CRASHED = "Crashed"
    INVALID = "Invalid"


@dataclass(frozen=True)
class Ending:
    """Why a Sandbox has ended: reason and message."""

    reason: FinishedReason
    message: str


@dataclass(frozen=True)
class Waiting:
    """What a pod that does not run yet waits for. `condition` is the condition that it keeps False."""

    condition: str
    reason: str
    message: str
    is_problem: bool
    """Whether the pod needs attention, because the wait will not end by itself soon."""


# By the kubelet's message for an evicted pod. The first three mean that the pod exceeded its own limit. The others mean that
# the node ran out and the pod used most.
_EVICTIONS = {
    "ephemeral local storage usage exceeds the total limit": FinishedReason.STORAGE_EXCEEDED,
    f"Container {CONTAINER} exceeded its local ephemeral storage limit": FinishedReason.STORAGE_EXCEEDED,
    "Usage of EmptyDir volume": FinishedReason.STORAGE_EXCEEDED,
    "low on resource: ephemeral-storage": FinishedReason.DISK_EXHAUSTED,
    "low on resource: inodes": FinishedReason.INODES_EXHAUSTED,
    "low on resource: pids": FinishedReason.PROCESSES_EXHAUSTED,
}
_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_IMAGE_REASONS = _PULL_REASONS | {"InvalidImageName", "ErrImageNeverPull", "SignatureValidationFailed"}
_NORMAL_START = frozenset({"", "ContainerCreating", "PodInitializing"})
# Reasons of containerd and CRI-O for a container whose state is unknown, as after a reboot of its node.
_STATE_UNKNOWN = frozenset({"ContainerStatusUnknown", "Unknown"})
_START_ERRORS = frozenset({"StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError"})


def is_running(pod: Manifest) -> bool:
    """Whether the container runs and has an address."""
    return "running" in _container(pod).get("state", {}) and bool(pod["status"].get("podIP"))


def has_begun(pod: Manifest) -> bool:
    return not {"running", "terminated"}.isdisjoint(_container(pod).get("state", {}))


def is_terminating(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def trial_failure(pod: Manifest) -> str | None:
    """Return the executor's message if it could not make an Overlay workspace."""
    ended = _terminated(pod)
    if ended is None or ended.get("exitCode") != TRIAL_FAILED_EXIT or pod["spec"].get("hostUsers") is not False:
        return None
    if "startedAt" in ended and parse_time(ended["finishedAt"]) - parse_time(ended["startedAt"]) > LONGEST_TRIAL:
        return None
    return _message_of(ended, "no reason was reported")


def exec_failure(pod: Manifest) -> str | None:
    """Return the runtime's message if the executor could not be executed from its image volume."""
    if not any(volume.get("name") == BUNDLE_VOLUME and "image" in volume for volume in pod["spec"].get("volumes", ())):
        return None
    state = _terminated(pod) or _waiting(pod)
    if state.get("reason") not in _START_ERRORS or "permission denied" not in state.get("message", ""):
        return None
    return _message_of(state)


def ending_of(pod: Manifest) -> Ending | None:
    """Return why the pod has ended or is about to; None while it lives."""
    status, ended = pod["status"], _terminated(pod)
    is_over = is_terminating(pod) or ended is not None or status.get("phase") in ("Failed", "Succeeded")
    if disrupted := disruption(pod, is_over=is_over):
        return Ending(FinishedReason(disrupted[0]), disrupted[1])
    if status.get("reason") == "DeadlineExceeded":
        return Ending(FinishedReason.DEADLINE_EXCEEDED, "its lifetime is over (spec.lifetimeSeconds)")
    if (evicted := _eviction(status)) is not None and is_over:
        message = _message_of(evicted, "Evicted")
        reason = next((_EVICTIONS[phrase] for phrase in _EVICTIONS if phrase in message), FinishedReason.EVICTED)
        return Ending(reason, message)
    if ended and ended.get("reason") == "OOMKilled":
        return Ending(
            FinishedReason.OOM_KILLED,
            "the kernel ended it: it exceeded its pod's memory limit, or its node ran out of memory",
        )
    if is_terminating(pod):
        return Ending(FinishedReason.POD_DELETED, "its pod was deleted")
    if ended:
        return _exit(ended)
    if not has_begun(pod) and (failed := _failed_init(pod)):  # later, another software's sidecar may have failed
        return Ending(FinishedReason.CRASHED, f"the executor could not be copied into the pod: {_how(failed)}")
    if _waiting(pod).get("reason") == "InvalidImageName":
        return Ending(FinishedReason.INVALID, f"spec.image: {_message_of(_waiting(pod))}; expected an image reference")
    if is_over:
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        return Ending(FinishedReason.EVICTED, f"its node refused the pod: {why or 'no reason was given'}")
    return None


def _eviction(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what has the message of the kubelet's eviction. The status loses it if the executor ended with 0 at that
    moment.
    """
    if status.get("reason") == "Evicted":
        return status
    target = true_conditions(status).get("DisruptionTarget", {})
    return target if target.get("reason") == "TerminationByKubelet" else None


def _exit(ended: Mapping[str, Any]) -> Ending:
    code = ended.get("exitCode")
    if ended.get("reason") in _STATE_UNKNOWN:
        return Ending(FinishedReason.NODE_LOST, f"its node lost the container, as after a reboot: {_message_of(ended)}")
    if code == 0:
        return Ending(FinishedReason.IDLE, "it received no request for spec.idleSeconds")
    return Ending(FinishedReason.CRASHED, f"the executor ended with {_how(ended)}")


def _how(ended: Mapping[str, Any]) -> str:
    code = f"signal {ended['signal']}" if ended.get("signal") else f"exit code {ended.get('exitCode')}"
    return f"{code}: {_message_of(ended, 'no reason was reported')}"


def waiting_for(pod: Manifest, now: datetime, container: str = CONTAINER) -> Waiting:
    """Return what a pod that is not running yet waits for, by the state of this container."""
    conditions = pod["status"].get("conditions", ())
    if scheduled := next((c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), None):
        return Waiting(SCHEDULED, scheduled.get("reason") or "Unschedulable", _message_of(scheduled), is_problem=True)
    if not pod["spec"].get("nodeName"):
        is_ignored = now - parse_time(pod["metadata"]["creationTimestamp"]) >= SCHEDULER_GRACE
        words = "no scheduler has processed it yet; check that its schedulerName is that of a running scheduler"
        return Waiting(SCHEDULED, "Pending", words, is_problem=is_ignored)
    waiting = _waiting(pod, container)
    reason = waiting.get("reason", "")
    if reason in _PULL_REASONS:
        # The kubelet alternates between two reasons. One reason and the registry's message keep the condition stable.
        words = _message_of(waiting).rpartition("ErrImagePull: ")[2]
        return Waiting(IMAGE_PULLED, "ImagePullBackOff", words, is_problem=True)
    if reason in _IMAGE_REASONS:
        return Waiting(IMAGE_PULLED, reason, _message_of(waiting), is_problem=True)
    node = pod["spec"]["nodeName"]
    words = _message_of(waiting, f"its image is being pulled, or its volumes are being mounted, on node {node}")
    return Waiting(READY, reason or "ContainerCreating", words, is_problem=reason not in _NORMAL_START)


def seconds_until_lost(node: Manifest, now: datetime) -> float | None:
    """Return the seconds until pods on a node that is not ready count as lost; None while it is ready."""
    if nodes.is_ready(node):
        return None
    since = next(
        (c.get("lastTransitionTime") for c in node["status"].get("conditions", ()) if c["type"] == "Ready"), None
    )
    return (parse_time(since) + NODE_GRACE - now).total_seconds() if since else NODE_GRACE.total_seconds()


def _container(pod: Manifest, name: str = CONTAINER) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((c for c in pod["status"].get("containerStatuses", ()) if c["name"] == name), {})
    return found


def _terminated(pod: Manifest) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = _container(pod).get("state", {}).get("terminated")
    return found


def _failed_init(pod: Manifest) -> Mapping[str, Any] | None:
    ends = (status.get("state", {}).get("terminated") for status in pod["status"].get("initContainerStatuses", ()))
    return next((ended for ended in ends if ended and ended.get("exitCode") != 0), None)


def _waiting(pod: Manifest, container: str = CONTAINER) -> Mapping[str, Any]:
    """Return what a container waits for. An init container's problem takes precedence over PodInitializing."""
    for status in (*pod["status"].get("initContainerStatuses", ()), _container(pod, container)):
        waiting: Mapping[str, Any] = status.get("state", {}).get("waiting") or {}
        if waiting.get("reason", "") not in _NORMAL_START:
            return waiting
    return _container(pod, container).get("state", {}).get("waiting") or {}


def _message_of(state: Mapping[str, Any], otherwise: str = "") -> str:
    """Return the message in a part of a pod's status."""
    return str(state.get("message") or "").strip() or otherwise
