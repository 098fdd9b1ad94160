"""Plan one Sandbox: return actions for the observed state. No side effects.

no pod ──► create it ──► it waits ──► it runs: Ready ──► it has ended: Finished ──► pod deleted ──► Sandbox deleted
                 ▲             │ Overlay does not work there, or the executor's volume cannot be executed,
                 └─────────────┘ and no client was served yet

A finding is written into the status first. The pod that it is based on is deleted in the next round. If another operator
takes over in between, it reaches the same result.

Two time limits are enforced elsewhere: the executor ends itself when idle, and the kubelet ends the pod after its lifetime
(`activeDeadlineSeconds`). The others are enforced here. `parking.py` plans what `spec.running` changes.
"""

from dataclasses import replace
from datetime import timedelta

from rollout_api.conditions import Condition
from rollout_api.on_cluster.nodes import has_user_namespaces
from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.sandbox_pod import NODES_LACK_USER_NAMESPACES, TRIAL_FAILED, handler_text
from rollout_api.sandbox import SandboxSpec, WorkspaceMode
from rollout_operator.actions import Action, Delete, Event, Plan, Ref, Remember
from rollout_operator.conditions import find, holds
from rollout_operator.sandbox import making, parking, status, steps
from rollout_operator.sandbox.observe import Observed, trial_failed_on, trials_fail
from rollout_operator.sandbox.reasons import (
    FINISHED,
    OVERLAY,
    READY,
    Ending,
    FinishedReason,
    exec_failure,
    has_begun,
    is_running,
    is_terminating,
    trial_failure,
)

KEPT_AFTER_FINISHED = timedelta(seconds=60)
"""Time for which a finished Sandbox is kept, so that its clients can read why it ended, even after a reconnect."""

REFUSED_FOR = timedelta(seconds=60)
"""Time for which a new Sandbox is retried while admission refuses every variant of its pod."""


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
        return steps.finish(seen, Ending(FinishedReason.INVALID, "; ".join(seen.spec)))
    if (planned := parking.plan(seen, seen.spec)) is not None:
        return planned
    planned = _without_pod(seen, seen.spec) if seen.pod is None else _with_pod(seen, seen.spec, seen.pod)
    return replace(planned, actions=(*planned.actions, *parking.deletes(seen, seen.jobs)))


def _clean_up(seen: Observed, finished: Condition) -> Plan:
    """Delete the pod now and the Sandbox later, so that clients can read why it ended."""
    actions: list[Action] = [*parking.deletes(seen, seen.jobs)]
    if seen.pod is not None and not is_terminating(seen.pod):
        actions.append(steps.delete_pod(seen, seen.pod))
    if seen.keep or (seen.owner is None and finished.reason == FinishedReason.INVALID):
        # An invalid Sandbox that a person created is kept, so that its author can read the reason.
        return Plan(tuple(actions))
    left = steps.seconds_left(finished.last_transition_time, KEPT_AFTER_FINISHED, seen.now)
    if left > 0:
        return Plan(tuple(actions), requeue_seconds=left)
    return Plan((*actions, Delete(Ref("Sandbox", seen.namespace, seen.name), seen.uid)))


def _without_pod(seen: Observed, spec: SandboxSpec) -> Plan:
    if (ready := find(seen.status.conditions, READY)) and ready.status == "True":
        return steps.without_its_pod(seen)
    left = steps.seconds_left(seen.created, timedelta(seconds=spec.start_seconds), seen.now)
    if left <= 0:
        words = seen.last_error or (ready.message if ready else "") or "the reason is unknown"
        return steps.finish(seen, steps.too_late(spec, f"its pod could not be created: {words}"))
    made = making.make_pod(seen, spec)
    if not isinstance(made, making.Invalid):
        return Plan(made, requeue_seconds=left)
    patience = steps.seconds_left(seen.created, REFUSED_FOR, seen.now)
    if made.may_pass and patience > 0:
        return steps.wait_to_be_admitted(seen, made.message, min(left, patience, making.REFUSAL_SECONDS))
    return steps.finish(seen, Ending(FinishedReason.INVALID, made.message), made.conditions)


def _with_pod(seen: Observed, spec: SandboxSpec, pod: Manifest) -> Plan:
    is_ready = holds(seen.status.conditions, READY)
    left = steps.seconds_left(seen.created, timedelta(seconds=spec.start_seconds), seen.now)

    if recreation := _recreate(seen, spec, pod, left):
        return recreation
    if ending := steps.ending(seen, pod, was_ready=is_ready):
        return steps.finish(seen, ending)
    lost_in = steps.lost_in(seen)
    if is_running(pod):
        return _report_ready(seen, spec, pod, lost_in)
    if is_ready:
        return Plan(requeue_seconds=lost_in)
    return steps.wait(seen, spec, pod, left if lost_in is None else min(left, lost_in))


def _report_ready(seen: Observed, spec: SandboxSpec, pod: Manifest, lost_in: float | None) -> Plan:
    learned = making.learned_refusals(seen)
    if holds(seen.status.conditions, READY):
        if not spec.running:
            return parking.begin(seen)
        waits = parking.wait_until_idle(seen, spec, pod)
        requeue = steps.soonest(lost_in, waits.requeue_seconds)
        return replace(waits, actions=(*learned, *waits.actions), requeue_seconds=requeue)
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
        return steps.recreate_with_copy(seen, pod, node, words, left)
    return None


def _recreate_plain(seen: Observed, spec: SandboxSpec, pod: Manifest, reason: str, message: str, left: float) -> Plan:
    if spec.workspaces.mode == WorkspaceMode.OVERLAY:
        ending = FinishedReason.CRASHED if reason == TRIAL_FAILED else FinishedReason.EVICTED
        return steps.finish(seen, Ending(ending, f"{message}; set spec.workspaces.mode to Auto or Plain"))
    if left <= 0:
        return steps.finish(seen, steps.too_late(spec, message))
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
    return Plan((steps.delete_pod(seen, pod, grace_seconds=0),), requeue_seconds=left)


def _trial_facts(seen: Observed, spec: SandboxSpec, pod: Manifest, message: str) -> tuple[Remember, ...]:
    """Return the facts to remember after a failed trial. After failures on two nodes, Overlay counts as unusable for the
    namespace and image.
    """
    node, image = pod["spec"].get("nodeName", ""), str(spec.image)
    learned = steps.remember(trial_failed_on(seen.namespace, image), node)
    if seen.nodes.total == 1 or seen.trial_failed_on not in (None, node):
        learned += steps.remember(trials_fail(seen.namespace, image), message)
    return learned
