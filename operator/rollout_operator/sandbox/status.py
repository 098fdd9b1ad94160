"""The status of a Sandbox in each state. If all goes well, it is first written when the pod runs."""

from collections.abc import Iterable
from datetime import datetime

from rollout_api.conditions import Condition
from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.sandbox_pod import SUPPORTED, places_of
from rollout_api.on_cluster.template import OVERLAY_ANNOTATION
from rollout_api.sandbox import SandboxPlaces, SandboxSpec, SandboxStatus, WorkspaceMode
from rollout_operator.conditions import condition, with_timestamps
from rollout_operator.sandbox.network import plain_caveat
from rollout_operator.sandbox.observe import Observed
from rollout_operator.sandbox.reasons import FINISHED, IMAGE_PULLED, ORDER, OVERLAY, PARKED, READY, SCHEDULED, Ending

PARKED_WORDS = "its files are stored; set spec.running to true to bring them back"


def mode_of(pod: Manifest) -> WorkspaceMode:
    """Return the workspace mode of a pod: only Overlay pods have their own user namespace."""
    return WorkspaceMode.OVERLAY if pod["spec"].get("hostUsers") is False else WorkspaceMode.PLAIN


def ready(seen: Observed, spec: SandboxSpec, pod: Manifest, *more: Condition) -> SandboxStatus:
    """Return the status of a Sandbox whose pod runs."""
    mode, node = mode_of(pod), pod["spec"].get("nodeName", "")
    conditions = [
        condition(SCHEDULED, True, "Scheduled", f"on node {node}"),
        condition(IMAGE_PULLED, True, "Pulled"),
        _overlay(pod, spec),
        condition(READY, True, "Running"),
        *more,
    ]
    return SandboxStatus(
        observed_generation=seen.generation,
        conditions=_now(seen, conditions),
        pod_name=pod["metadata"]["name"],
        pod_ip=pod["status"]["podIP"],
        node_name=node,
        mode=mode,
        places=SandboxPlaces(total=places_of(spec, mode)),
        parking=seen.status.parking,
    )


def without_pod(seen: Observed, reason: str, message: str) -> SandboxStatus:
    """Return the status after a failed Overlay pod, before a Plain one is created."""
    conditions = [
        condition(OVERLAY, False, reason, message),
        condition(READY, False, reason, "its pod is created again in Plain mode"),
    ]
    return SandboxStatus(observed_generation=seen.generation, conditions=_now(seen, conditions))


def parked(seen: Observed, message: str) -> SandboxStatus:
    """Return the status of a Sandbox whose files are stored. Its next pod must have the same mode."""
    kept = [found for found in seen.status.conditions if found.type in (OVERLAY, PARKED, READY)]
    conditions = [condition(PARKED, True, "Stored", message), condition(READY, False, PARKED, PARKED_WORDS)]
    return SandboxStatus(
        observed_generation=seen.generation,
        conditions=merged(kept, conditions, seen.now, seen.generation),
        mode=seen.status.mode,
        parking=seen.status.parking,
    )


def finished(seen: Observed, ending: Ending, more: Iterable[Condition]) -> SandboxStatus:
    """Return the status of a finished Sandbox. Details of its pod stay readable."""
    end = condition(FINISHED, True, ending.reason.value, ending.message)
    return with_conditions(seen, [*more, condition(READY, False, ending.reason.value), end])


def with_conditions(seen: Observed, conditions: Iterable[Condition]) -> SandboxStatus:
    """Return the status with these conditions added or replaced."""
    update = {"observed_generation": seen.generation, "conditions": _now(seen, conditions)}
    return seen.status.model_copy(update=update)


def _now(seen: Observed, conditions: Iterable[Condition]) -> list[Condition]:
    return merged(seen.status.conditions, conditions, seen.now, seen.generation)


def merged(
    old: Iterable[Condition], new: Iterable[Condition], now: datetime, generation: int | None
) -> list[Condition]:
    """Merge new conditions into the old ones, in the order of ORDER.

    A condition with unchanged status and reason keeps its old message too. Messages of schedulers and registries change
    all the time, and with thousands of sandboxes each change would be a write.
    """
    by_type = {found.type: found for found in old}
    for fresh in new:
        before = by_type.get(fresh.type)
        if before is None or (before.status, before.reason) != (fresh.status, fresh.reason):
            by_type[fresh.type] = with_timestamps(fresh, before, now, generation)
    return [by_type[kind] for kind in ORDER if kind in by_type]


def _overlay(pod: Manifest, spec: SandboxSpec) -> Condition:
    """Return the condition recorded on the pod when its mode was chosen. Nodes and namespaces may have changed since."""
    note = (pod["metadata"].get("annotations") or {}).get(OVERLAY_ANNOTATION, "")
    reason, _, message = note.partition(": ")
    if mode_of(pod) == WorkspaceMode.OVERLAY:
        return condition(OVERLAY, True, SUPPORTED)
    explanation = ". ".join(filter(None, (message.removesuffix("."), plain_caveat(spec.network))))
    return condition(OVERLAY, False, reason or "Unknown", explanation)
