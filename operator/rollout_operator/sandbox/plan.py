"""Plan one Sandbox: return actions for the observed state. No side effects.

no pod ──► create it ──► it waits ──► it runs: Ready ──► it has ended: Finished ──► pod deleted ──► Sandbox deleted
                 ▲             │ Overlay does not work there, or the executor's volume cannot be executed,
                 └─────────────┘ and no client was served yet

A finding is written into the status first. The pod that it is based on is deleted in the next round. If another operator
takes over in between, it reaches the same result.

Two time limits are enforced elsewhere: the executor ends itself when idle, and the kubelet ends the pod after its lifetime
(`activeDeadlineSeconds`). The others are enforced here.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from rollout_api.conditions import Condition
from rollout_api.on_cluster.nodes import has_user_namespaces, is_ready
from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.sandbox_pod import NODES_LACK_USER_NAMESPACES, TRIAL_FAILED, handler_text
from rollout_api.sandbox import SandboxSpec, WorkspaceMode
from rollout_operator.actions import Action, Delete, Event, Fact, Plan, Ref, Remember
from rollout_operator.cache import uid_of
from rollout_operator.conditions import condition, find, holds, parse_time
from rollout_operator.sandbox import making, status
from rollout_operator.sandbox.observe import Observed, exec_failed, trial_failed_on, trials_fail
from rollout_operator.sandbox.reasons import (
    FINISHED,
    NODE_GRACE,
    OVERLAY,
    READY,
    SCHEDULER_GRACE,
    Ending,
    FinishedReason,
    Waiting,
    ending_of,
    exec_failure,
    has_begun,
    is_running,
    is_terminating,
    seconds_until_lost,
    trial_failure,
    waiting_for,
)

KEPT_AFTER_FINISHED = timedelta(seconds=60)
"""Time for which a finished Sandbox is kept, so that its clients can read why it ended, even after a reconnect."""

MISSED_AFTER = timedelta(seconds=5)
"""Time after which a missing pod counts as deleted. Earlier, the cache may lack it: Pods and Sandboxes have separate
watches.
"""

REFUSED_FOR = timedelta(seconds=60)
"""Time for which a new Sandbox is retried while admission refuses every variant of its pod."""


def seconds_left(since: str | datetime | None, limit: timedelta, now: datetime) -> float:
    """Return the remaining seconds of a time limit; 0 or less if it is over or its start is unknown."""
    begin = parse_time(since) if isinstance(since, str) else since
    return 0.0 if begin is None else (begin + limit - now).total_seconds()


POD_REFUSED = "PodRefused"
"""Reason of the condition Ready while admission refuses every variant of a new Sandbox's pod."""


def plan(seen: Observed) -> Plan:
    """Return the actions; none if the operator only waits for a change or `requeue_seconds`."""
    if seen.is_deleted:
        return Plan()
    planned = _plan(seen)
    if seen.pod is None or isinstance(seen.spec, list):
        return planned
    # The NetworkPolicy may have been deleted. Without it, the pod's processes could connect to the cluster.
    return replace(planned, actions=(*making.missing_policy(seen, seen.spec), *planned.actions))


def _plan(seen: Observed) -> Plan:
    if finished := find(seen.status.conditions, FINISHED):
        return _clean_up(seen, finished)
    if isinstance(seen.spec, list):
        return _finish(seen, Ending(FinishedReason.INVALID, "; ".join(seen.spec)))
    if seen.pod is None:
        return _without_pod(seen, seen.spec)
    return _with_pod(seen, seen.spec, seen.pod)


def _clean_up(seen: Observed, finished: Condition) -> Plan:
    """Delete the pod now and the Sandbox later, so that clients can read why it ended."""
    actions: list[Action] = []
    if seen.pod is not None and not is_terminating(seen.pod):
        actions.append(_delete_pod(seen, seen.pod))
    if seen.keep or (seen.owner is None and finished.reason == FinishedReason.INVALID):
        # An invalid Sandbox that a person created is kept, so that its author can read the reason.
        return Plan(tuple(actions))
    left = seconds_left(finished.last_transition_time, KEPT_AFTER_FINISHED, seen.now)
    if left > 0:
        return Plan(tuple(actions), requeue_seconds=left)
    return Plan((*actions, Delete(Ref("Sandbox", seen.namespace, seen.name), seen.uid)))


def _without_pod(seen: Observed, spec: SandboxSpec) -> Plan:
    if (ready := find(seen.status.conditions, READY)) and ready.status == "True":
        seconds = seconds_left(ready.last_transition_time, MISSED_AFTER, seen.now)
        return Plan(requeue_seconds=seconds) if seconds > 0 else _finish(seen, _ending_of_missing_pod(seen))
    left = seconds_left(seen.created, timedelta(seconds=spec.start_seconds), seen.now)
    if left <= 0:
        words = seen.last_error or (ready.message if ready else "") or "the reason is unknown"
        return _finish(seen, _too_late(spec, f"its pod could not be created: {words}"))
    made = making.make_pod(seen, spec)
    if not isinstance(made, making.Invalid):
        return Plan(made, requeue_seconds=left)
    patience = seconds_left(seen.created, REFUSED_FOR, seen.now)
    if made.may_pass and patience > 0:
        return _wait_to_be_admitted(seen, made.message, min(left, patience, making.REFUSAL_SECONDS))
    return _finish(seen, Ending(FinishedReason.INVALID, made.message), made.conditions)


def _wait_to_be_admitted(seen: Observed, words: str, seconds: float) -> Plan:
    refused = condition(READY, False, POD_REFUSED, words)
    fresh = status.with_conditions(seen, [refused])
    if fresh == seen.status:
        return Plan(requeue_seconds=seconds)
    return Plan(status=fresh.wire(), events=(Event("Warning", POD_REFUSED, words),), requeue_seconds=seconds)


def _with_pod(seen: Observed, spec: SandboxSpec, pod: Manifest) -> Plan:
    is_ready = holds(seen.status.conditions, READY)
    left = seconds_left(seen.created, timedelta(seconds=spec.start_seconds), seen.now)

    if recreation := _recreate(seen, spec, pod, left):
        return recreation
    if ending := ending_of(pod) or _ending_by_replacement(seen, pod, is_ready=is_ready):
        return _finish(seen, ending)
    lost_in = seconds_until_lost(seen.node, seen.now) if seen.node is not None and seen.nodes.ready else None
    if lost_in is not None and lost_in <= 0:
        node_name = pod["spec"].get("nodeName")
        message = f"its node {node_name} has not been ready for {NODE_GRACE.total_seconds():.0f} s"
        return _finish(seen, Ending(FinishedReason.NODE_LOST, message))
    if is_running(pod):
        return _report_ready(seen, spec, pod, lost_in)
    if is_ready:
        return Plan(requeue_seconds=lost_in)
    return _wait(seen, spec, pod, left if lost_in is None else min(left, lost_in))


def _wait(seen: Observed, spec: SandboxSpec, pod: Manifest, left: float) -> Plan:
    waiting = waiting_for(pod, seen.now)
    conditions = _conditions_of(waiting)
    if left <= 0:
        return _finish(seen, _too_late(spec, f"{waiting.reason}: {waiting.message}"), conditions)
    fresh = status.with_conditions(seen, conditions)
    if not conditions:
        return Plan(requeue_seconds=min(left, SCHEDULER_GRACE.total_seconds()))
    if fresh == seen.status:
        return Plan(requeue_seconds=left)
    event = Event("Warning", waiting.reason, waiting.message)
    return Plan(status=fresh.wire(), events=(event,), requeue_seconds=left)


def _report_ready(seen: Observed, spec: SandboxSpec, pod: Manifest, lost_in: float | None) -> Plan:
    learned = making.learned_refusals(seen)
    if holds(seen.status.conditions, READY):
        return Plan(learned, requeue_seconds=lost_in)
    fresh = status.ready(seen, spec, pod)
    overlay = find(fresh.conditions, OVERLAY)
    events: tuple[Event, ...] = ()
    if overlay and overlay.status == "False" and spec.workspaces.mode == WorkspaceMode.AUTO:
        events = (Event("Normal", overlay.reason, f"its workspaces are Plain: {overlay.message}"),)
    return Plan(learned, fresh.wire(), events, lost_in)


def _recreate(seen: Observed, spec: SandboxSpec, pod: Manifest, left: float) -> Plan | None:
    """Return a plan that creates another variant of a pod whose executor could not start; None if that does not apply."""
    node = pod["spec"].get("nodeName", "")
    if (words := trial_failure(pod)) is not None:
        message = f"Overlay failed on node {node}: {words}"
        return _recreate_plain(seen, spec, pod, TRIAL_FAILED, message, left)
    handler = spec.runtime_class_name or ""
    lacks = seen.node is not None and not has_user_namespaces(seen.node, handler)
    if lacks and status.mode_of(pod) == WorkspaceMode.OVERLAY and not has_begun(pod):
        message = f"node {node} offers no user namespaces for its {handler_text(handler)}"
        return _recreate_plain(seen, spec, pod, NODES_LACK_USER_NAMESPACES, message, left)
    if (words := exec_failure(pod)) is not None and left > 0:
        return _recreate_with_copy(seen, pod, node, words, left)
    return None


def _recreate_plain(seen: Observed, spec: SandboxSpec, pod: Manifest, reason: str, message: str, left: float) -> Plan:
    if spec.workspaces.mode == WorkspaceMode.OVERLAY:
        ending = FinishedReason.CRASHED if reason == TRIAL_FAILED else FinishedReason.EVICTED
        return _finish(seen, Ending(ending, f"{message}; set spec.workspaces.mode to Auto or Plain"))
    if left <= 0:
        return _finish(seen, _too_late(spec, message))
    overlay = find(seen.status.conditions, OVERLAY)
    if overlay is None or overlay.status != "False":
        fresh = status.without_pod(seen, reason, message)
        return Plan(
            actions=_trial_facts(seen, spec, pod, message) if reason == TRIAL_FAILED else (),
            status=fresh.wire(),
            events=(Event("Warning", "OverlayTrialFailed" if reason == TRIAL_FAILED else reason, message),),
            requeue_seconds=left,
        )
    if is_terminating(pod):
        return Plan(requeue_seconds=left)
    # The container has ended, so the pod can be deleted without a grace period, which frees its name.
    return Plan((_delete_pod(seen, pod, grace_seconds=0),), requeue_seconds=left)


def _trial_facts(seen: Observed, spec: SandboxSpec, pod: Manifest, message: str) -> tuple[Remember, ...]:
    """Return the facts to remember after a failed trial. After failures on two nodes, Overlay counts as unusable for the
    namespace and image.
    """
    node, image = pod["spec"].get("nodeName", ""), str(spec.image)
    learned = _remember(trial_failed_on(seen.namespace, image), node)
    if seen.nodes.total == 1 or seen.trial_failed_on not in (None, node):
        learned += _remember(trials_fail(seen.namespace, image), message)
    return learned


def _recreate_with_copy(seen: Observed, pod: Manifest, node: str, words: str, left: float) -> Plan:
    """Have an init container copy the executor, because some runtimes mount image volumes with `noexec`."""
    if is_terminating(pod):
        return Plan(requeue_seconds=left)
    message = (
        f"the executor cannot be executed from its image volume on node {node}, so an init container copies it: {words}"
    )
    return Plan(
        (*_remember(exec_failed(seen.namespace), words), _delete_pod(seen, pod, grace_seconds=0)),
        events=(Event("Normal", "ImageVolumeNotExecutable", message),),
        requeue_seconds=left,
    )


def _finish(seen: Observed, ending: Ending, more: Iterable[Condition] = ()) -> Plan:
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


def _too_late(spec: SandboxSpec, words: str) -> Ending:
    message = f"the Sandbox was not ready {spec.start_seconds} s after its creation (spec.startSeconds): {words}"
    return Ending(FinishedReason.START_DEADLINE_EXCEEDED, message)


def _conditions_of(waiting: Waiting) -> list[Condition]:
    if not waiting.is_problem:
        return []
    unmet = condition(waiting.condition, False, waiting.reason, waiting.message)
    # Ready gets the same reason, because `kubectl get` shows only that of Ready.
    return [unmet] if unmet.type == READY else [unmet, condition(READY, False, waiting.reason)]


def _delete_pod(seen: Observed, pod: Manifest, grace_seconds: int | None = None) -> Delete:
    return Delete(Ref("Pod", seen.namespace, seen.name), uid_of(pod), grace_seconds)


def _remember(fact: Fact, words: str) -> tuple[Remember, ...]:
    return (Remember(fact, words, making.LEARNED_SECONDS),)
