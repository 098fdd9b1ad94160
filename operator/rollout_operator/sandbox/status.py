"""The status of a Sandbox in each of its situations. In the good case it is written once, when the pod runs."""

from collections.abc import Iterable
from datetime import datetime

from rollout_api.conditions import Condition
from rollout_api.sandbox import SandboxPlaces, SandboxSpec, SandboxStatus, WorkspaceMode
from rollout_operator.actions import Manifest
from rollout_operator.sandbox.conditions import (
    FINISHED,
    IMAGE_PULLED,
    OVERLAY,
    READY,
    SCHEDULED,
    condition,
    merged,
)
from rollout_operator.sandbox.mode import SUPPORTED
from rollout_operator.sandbox.network import plain_caveat
from rollout_operator.sandbox.pod import places_of
from rollout_operator.sandbox.pod_names import OVERLAY_ANNOTATION
from rollout_operator.sandbox.reasons import Ending


def mode_of(pod: Manifest) -> WorkspaceMode:
    """How workspaces are made in a pod: only Overlay has a user namespace of its own."""
    return WorkspaceMode.OVERLAY if pod["spec"].get("hostUsers") is False else WorkspaceMode.PLAIN


def ready(old: SandboxStatus, spec: SandboxSpec, pod: Manifest, now: datetime, generation: int | None) -> SandboxStatus:
    """Its pod runs."""
    mode, node = mode_of(pod), pod["spec"].get("nodeName", "")
    conditions = [
        condition(SCHEDULED, True, "Scheduled", f"on node {node}"),
        condition(IMAGE_PULLED, True, "Pulled"),
        _overlay(pod, spec),
        condition(READY, True, "Running"),
    ]
    return SandboxStatus(
        observed_generation=generation,
        conditions=merged(old.conditions, conditions, now, generation),
        pod_name=pod["metadata"]["name"],
        pod_ip=pod["status"]["podIP"],
        node_name=node,
        mode=mode,
        places=SandboxPlaces(total=places_of(spec, mode)),
    )


def without_pod(old: SandboxStatus, reason: str, message: str, now: datetime, generation: int | None) -> SandboxStatus:
    """Its Overlay pod was of no use; a Plain one is to come."""
    conditions = [
        condition(OVERLAY, False, reason, message),
        condition(READY, False, reason, "its pod is made again in Plain mode"),
    ]
    return SandboxStatus(observed_generation=generation, conditions=merged(old.conditions, conditions, now, generation))


def finished(
    old: SandboxStatus, ending: Ending, more: Iterable[Condition], now: datetime, generation: int | None
) -> SandboxStatus:
    """It has ended. What was known of its pod stays readable."""
    conditions = [
        *more,
        condition(READY, False, ending.reason.value),
        condition(FINISHED, True, ending.reason.value, ending.message),
    ]
    return with_conditions(old, conditions, now, generation)


def with_conditions(
    old: SandboxStatus, conditions: Iterable[Condition], now: datetime, generation: int | None
) -> SandboxStatus:
    """The old status with these conditions in it."""
    update = {"observed_generation": generation, "conditions": merged(old.conditions, conditions, now, generation)}
    return old.model_copy(update=update)


def _overlay(pod: Manifest, spec: SandboxSpec) -> Condition:
    """What was written on the pod when its mode was chosen; nodes and namespaces may have changed since."""
    note = (pod["metadata"].get("annotations") or {}).get(OVERLAY_ANNOTATION, "")
    reason, _, message = note.partition(": ")
    if mode_of(pod) == WorkspaceMode.OVERLAY:
        return condition(OVERLAY, True, SUPPORTED)
    said = ". ".join(filter(None, (message.removesuffix("."), plain_caveat(spec.network))))
    return condition(OVERLAY, False, reason or "Unknown", said)
