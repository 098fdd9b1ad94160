"""Conditions of objects, why a pod does not start, and why Kubernetes ended it."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

from rollout_api.conditions import Condition, true_conditions
from rollout_operator.tenant_limits import MOST_CHARACTERS, shortened

_NORMAL_START: Final = ("ContainerCreating", "PodInitializing")
# By reason of Kubernetes' condition DisruptionTarget.
_DISRUPTIONS: Final = {
    "PreemptionByScheduler": "Preempted",
    "EvictionByEvictionAPI": "Evicted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
}
# By `status.reason`, which the kubelet sets. Its evictions are missing: the pod itself may have used up its node's disk.
_POD_REASONS: Final = {
    "Preempting": "Preempted",
    "NodeLost": "NodeLost",
    "NodeShutdown": "NodeLost",
    "Terminated": "NodeLost",
    "Shutdown": "NodeLost",
}


def condition(kind: str, holds: bool, reason: str, message: str = "", most: int = MOST_CHARACTERS) -> Condition:
    """Build a condition, with its message shortened to `most` characters."""
    words = shortened(message.strip(), most)
    return Condition(type=kind, status="True" if holds else "False", reason=reason, message=words)


def with_timestamps(fresh: Condition, before: Condition | None, now: datetime, generation: int | None) -> Condition:
    """Return a condition with generation and transition time. The time is kept while the status is unchanged."""
    since = before.last_transition_time if before is not None and before.status == fresh.status else None
    change = {"observed_generation": generation, "last_transition_time": since or timestamp(now)}
    return fresh.model_copy(update=change)


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((found for found in conditions if found.type == kind), None)


def holds(conditions: Iterable[Condition], kind: str) -> bool:
    """Whether a condition of that type exists and is True."""
    found = find(conditions, kind)
    return found is not None and found.status == "True"


def timestamp(moment: datetime) -> str:
    """Format a time as RFC 3339 in whole seconds, as Kubernetes does."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def start_problem(status: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a pod does not start, as reason and message; None if nothing is wrong."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "")
    containers = chain(status.get("initContainerStatuses") or (), status.get("containerStatuses") or ())
    for container in containers:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "ContainerCreating")
        if reason not in _NORMAL_START:
            # The kubelet alternates between ErrImagePull and ImagePullBackOff; one name keeps the status stable.
            return "ImagePullBackOff" if reason == "ErrImagePull" else reason, waiting.get("message", "")
    return None


def end_of_job(job: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the condition of a Job's success, and that of its failure; None for each that does not hold.

    SuccessCriteriaMet and FailureTarget come earlier than Complete and Failed, which wait for the end of every pod. A pod
    on a dead node may never end.
    """
    true = true_conditions(job.get("status") or {})
    return true.get("SuccessCriteriaMet") or true.get("Complete"), true.get("FailureTarget") or true.get("Failed")


def disruption(pod: Mapping[str, Any], *, is_over: bool) -> tuple[str, str] | None:
    """Return why Kubernetes ended a pod for a cause outside of it: Preempted, Evicted or NodeLost, and a message.

    `is_over`: whether the pod has ended or is about to. The condition alone is not enough: Kubernetes sets it in advance,
    and sometimes does not end the pod.
    """
    status = pod.get("status") or {}
    found = true_conditions(status).get("DisruptionTarget", {}) if is_over else {}
    kind = _DISRUPTIONS.get(found.get("reason", ""))
    if kind is None:
        found, kind = status, _POD_REASONS.get(status.get("reason", ""))
    return None if kind is None else (kind, str(found.get("message") or "").strip() or found["reason"])
