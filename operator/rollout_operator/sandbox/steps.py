"""Steps that the plans of a Sandbox share: how it waits, finishes, and loses its pod. No side effects."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

from rollout_api.conditions import Condition
from rollout_api.on_cluster.nodes import is_ready
from rollout_api.on_cluster.objects import Manifest
from rollout_api.sandbox import SandboxSpec
from rollout_operator.actions import Delete, Event, Fact, Plan, Ref, Remember
from rollout_operator.cache import uid_of
from rollout_operator.conditions import condition, find, parse_time
from rollout_operator.sandbox import making, status
from rollout_operator.sandbox.observe import Observed, exec_failed
from rollout_operator.sandbox.reasons import (
    NODE_GRACE,
    READY,
    SCHEDULER_GRACE,
    Ending,
    FinishedReason,
    Waiting,
    ending_of,
    is_terminating,
    seconds_until_lost,
    waiting_for,
)

MISSED_AFTER = timedelta(seconds=5)
"""Time after which a missing pod counts as deleted. Earlier, the cache may lack it: Pods and Sandboxes have separate
watches.
"""


POD_REFUSED = "PodRefused"
"""Reason of the condition Ready while admission refuses every variant of a new Sandbox's pod."""


def seconds_left(since: str | datetime | None, limit: timedelta, now: datetime) -> float:
    """Return the remaining seconds of a time limit; 0 or less if it is over or its start is unknown."""
    begin = parse_time(since) if isinstance(since, str) else since
    return 0.0 if begin is None else (begin + limit - now).total_seconds()


def wait_to_be_admitted(seen: Observed, words: str, seconds: float) -> Plan:
    refused = condition(READY, False, POD_REFUSED, words)
    fresh = status.with_conditions(seen, [refused])
    if fresh == seen.status:
        return Plan(requeue_seconds=seconds)
    return Plan(status=fresh.wire(), events=(Event("Warning", POD_REFUSED, words),), requeue_seconds=seconds)


def wait(seen: Observed, spec: SandboxSpec, pod: Manifest, left: float) -> Plan:
    waiting = waiting_for(pod, seen.now)
    conditions = _conditions_of(waiting)
    if left <= 0:
        return finish(seen, too_late(spec, f"{waiting.reason}: {waiting.message}"), conditions)
    fresh = status.with_conditions(seen, conditions)
    if not conditions:
        return Plan(requeue_seconds=min(left, SCHEDULER_GRACE.total_seconds()))
    if fresh == seen.status:
        return Plan(requeue_seconds=left)
    event = Event("Warning", waiting.reason, waiting.message)
    return Plan(status=fresh.wire(), events=(event,), requeue_seconds=left)


def soonest(*seconds: float | None) -> float | None:
    """Return the shortest of these times; None if none is set."""
    return min(filter(None, seconds), default=None)


def lost_in(seen: Observed) -> float | None:
    """Return the seconds until its node counts as lost; None while the node is ready, or no node is."""
    return seconds_until_lost(seen.node, seen.now) if seen.node is not None and seen.nodes.ready else None


def ending(seen: Observed, pod: Manifest, *, was_ready: bool) -> Ending | None:
    """Return why its pod has ended, or is lost; None while it lives."""
    if found := ending_of(pod) or _ending_by_replacement(seen, pod, is_ready=was_ready):
        return found
    seconds = lost_in(seen)
    if seconds is None or seconds > 0:
        return None
    node_name = pod["spec"].get("nodeName")
    message = f"its node {node_name} has not been ready for {NODE_GRACE.total_seconds():.0f} s"
    return Ending(FinishedReason.NODE_LOST, message)


def without_its_pod(seen: Observed) -> Plan:
    """Finish a Sandbox whose pod is missing, once the cache cannot just lack it."""
    ready = find(seen.status.conditions, READY)
    seconds = seconds_left(ready.last_transition_time if ready else None, MISSED_AFTER, seen.now)
    return Plan(requeue_seconds=seconds) if seconds > 0 else finish(seen, _ending_of_missing_pod(seen))


def recreate_with_copy(seen: Observed, pod: Manifest, node: str, words: str, left: float) -> Plan:
    """Have an init container copy the executor, because some runtimes mount image volumes with `noexec`."""
    if is_terminating(pod):
        return Plan(requeue_seconds=left)
    message = (
        f"the executor cannot be executed from its image volume on node {node}, so an init container copies it: {words}"
    )
    return Plan(
        (*remember(exec_failed(seen.namespace), words), delete_pod(seen, pod, grace_seconds=0)),
        events=(Event("Normal", "ImageVolumeNotExecutable", message),),
        requeue_seconds=left,
    )


def finish(seen: Observed, ending: Ending, more: Iterable[Condition] = ()) -> Plan:
    fresh = status.finished(seen, ending, more)
    kind: Literal["Normal", "Warning"] = "Normal" if ending.reason == FinishedReason.IDLE else "Warning"
    return Plan(status=fresh.wire(), events=(Event(kind, ending.reason.value, ending.message),))


def _ending_of_missing_pod(seen: Observed) -> Ending:
    """Return why a Sandbox ended whose pod no longer exists."""
    node = seen.status.node_name or ""
    if seen.nodes.ready and (seen.node is None or not is_ready(seen.node)):
        return Ending(FinishedReason.NODE_LOST, f"its pod no longer exists, and its node {node} is not ready")
    return Ending(FinishedReason.POD_DELETED, "its pod was deleted")


def _ending_by_replacement(seen: Observed, pod: Manifest, *, is_ready: bool) -> Ending | None:
    """Return the ending of a Sandbox if its pod was replaced by another pod, which lacks its workspaces; else None."""
    address = pod["status"].get("podIP")
    if not is_ready or not address or address == seen.status.pod_ip:
        return None
    return Ending(FinishedReason.POD_DELETED, f"its pod ({seen.status.pod_ip}) was replaced by another one ({address})")


def too_late(spec: SandboxSpec, words: str) -> Ending:
    message = f"the Sandbox was not ready {spec.start_seconds} s after its creation (spec.startSeconds): {words}"
    return Ending(FinishedReason.START_DEADLINE_EXCEEDED, message)


def _conditions_of(waiting: Waiting) -> list[Condition]:
    if not waiting.is_problem:
        return []
    unmet = condition(waiting.condition, False, waiting.reason, waiting.message)
    # Ready gets the same reason, because `kubectl get` shows only that of Ready.
    return [unmet] if unmet.type == READY else [unmet, condition(READY, False, waiting.reason)]


def delete_pod(seen: Observed, pod: Manifest, grace_seconds: int | None = None) -> Delete:
    return Delete(Ref("Pod", seen.namespace, seen.name), uid_of(pod), grace_seconds)


def remember(fact: Fact, words: str) -> tuple[Remember, ...]:
    return (Remember(fact, words, making.LEARNED_SECONDS),)
