"""Plan what `spec.running` changes: storing the files of a Sandbox and giving its pod back, and the way back.

Ready ──► Parking: a Job stores ──► Parked: no pod ──► Restoring: new pod, a Job brings the files back ──► Ready
             │ fails                                      ▲          │ pod or Job fails
             └──► StoreFailed: the pod is kept            └──────────┘

From Parking until the end of the Job, the executor is still: it refuses every change, and does not end itself for idleness.

Both conditions, Parked and the reason of Ready, are the whole state. A pod is deleted for parking only while Parked is
True, which says that everything is stored. Each parking has the next number, `status.parking`. Jobs of other numbers count
for nothing, whatever they report, and only the files of this number are brought back. No side effects.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from rollout_api.cluster import (
    KEY_FILE,
    MANAGED_BY,
    PARKED_ANNOTATION,
    PARKING_ANNOTATION,
    POD_ANNOTATION,
    RUNNER_FOLDER,
    STORED_IN_PART,
    by_hand_name,
    executor_token,
    parking_labels,
)
from rollout_api.conditions import Condition
from rollout_api.on_cluster.objects import Json, Manifest, owned_object, owner_reference
from rollout_api.sandbox import SandboxSpec, WorkspaceMode
from rollout_operator.actions import (
    Action,
    AskExecutors,
    Create,
    Delete,
    Event,
    ExecutorRequest,
    Patch,
    Plan,
    Ref,
    Remember,
    Still,
)
from rollout_operator.cache import uid_of
from rollout_operator.conditions import condition, find, holds, parse_time
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.runner_pod import container_fields, pod_fields
from rollout_operator.sandbox import making, status, steps
from rollout_operator.sandbox.observe import CONTAINER, NO_POD_AFTER, Observed, ParkingJob, restoring_pauses
from rollout_operator.sandbox.reasons import PARKED, READY, FinishedReason, exec_failure, is_running, is_terminating

PARKING, STORE_FAILED, RESTORING, RESTORE_FAILED = "Parking", "StoreFailed", "Restoring", "RestoreFailed"
RESTORED: Final = "Restored"
IN_PART: Final = "StoredInPart"
"""Reason of Parked, which is False: the pod is kept, because it has files that are not stored."""

RETRIES: Final = 3
"""Failures of a Job's pods after which it has failed. Kubernetes' pauses before them are 10, 20 and 40 s."""
MOST_SECONDS: Final = 3600
"""Time limit of a Job, with all its retries: enough for 30 GB at 10 MB/s."""
STORING_WORDS: Final = "its files are being stored"
RESTORING_WORDS: Final = "its files are brought back into a new pod"
PAUSE_SECONDS: Final = 20.0
"""Pause before the next try to bring a Sandbox back."""
LEAST_ASK_SECONDS: Final = 5.0
"""Shortest interval between two questions for how long a Sandbox has been idle."""
UNANSWERED: Final = timedelta(seconds=30)
"""Longest pause after a question without an answer."""


def plan(seen: Observed, spec: SandboxSpec) -> Plan | None:
    """Return the plan of a Sandbox that is parked or on the way there; None for any other one."""
    parked, ready = (find(seen.status.conditions, kind) for kind in (PARKED, READY))
    if parked is not None and parked.status == "True":
        return _bring_back(seen, spec, parked) if spec.running else _stay_parked(seen)
    match ready.reason if ready is not None else "":
        case "Parking" | "ParkingWaits":
            return _store(seen, spec)
        case "StoreFailed":
            return _after_failure(seen, spec)
    return None


def wait_until_idle(seen: Observed, spec: SandboxSpec, pod: Manifest) -> Plan:
    """Return the plan of a Ready Sandbox: with `parking.whenIdle`, ask its executor to become still if it has been idle for
    `idleSeconds`, and set `running: false` once it is still.

    The executor decides: it refuses every change from that moment on, so no report can be out of date.
    """
    if not spec.parks_when_idle:
        return Plan()
    if seen.key is None:
        return Plan((making.key_action(seen),))
    if (report := _report_of(seen, _next_number(seen))) is not None:
        if report.answered and report.is_still:
            words = f"it received no request for {spec.idle_seconds} s (spec.idleSeconds), so it is parked"
            # The version, because the network may deliver the write long after the Sandbox is back.
            body = {"metadata": {"uid": seen.uid, "resourceVersion": seen.version}, "spec": {"running": False}}
            change = Patch(Ref("Sandbox", seen.namespace, seen.name), body)
            return Plan((change,), events=(Event("Normal", FinishedReason.IDLE.value, words),))
        idle = report.idle_seconds if report.answered else 0.0
        wait = timedelta(seconds=max(LEAST_ASK_SECONDS, spec.idle_seconds - idle))
        left = steps.seconds_left(report.at, wait if report.answered else min(wait, UNANSWERED), seen.now)
        if left > 0:
            return Plan(requeue_seconds=left)
    return Plan((_ask(seen, pod, Still(_next_number(seen), idle_seconds=spec.idle_seconds)),))


def _report_of(seen: Observed, parking: int) -> ExecutorReport | None:
    """Return what its executor answered about that parking. Each pod has other parkings."""
    return seen.report if seen.report is not None and seen.report.parking == parking else None


def _ask(seen: Observed, pod: Manifest, still: Still) -> Action:
    """Return the action that asks its executor; first of all, that learns its key."""
    if seen.key is None:
        return making.key_action(seen)
    token = executor_token(seen.key, seen.name, seen.uid)
    address = pod["status"].get("podIP", "")
    return AskExecutors((ExecutorRequest(seen.namespace, seen.name, seen.uid, address, token, still=still),))


def begin(seen: Observed) -> Plan:
    """Return the plan that begins to park a Ready Sandbox."""
    seen = replace(seen, status=seen.status.model_copy(update={"parking": _next_number(seen)}))
    return _report(seen, "Normal", PARKING, STORING_WORDS, PARKING)


def _number(seen: Observed) -> int:
    """Return the number of the current parking, or of the last one."""
    return seen.status.parking or 0


def _next_number(seen: Observed) -> int:
    return _number(seen) + 1


def deletes(seen: Observed, jobs: Iterable[ParkingJob]) -> tuple[Delete, ...]:
    """Return the actions that delete these Jobs, and their pods."""
    return tuple(Delete(Ref("Job", seen.namespace, job.name), job.uid) for job in jobs)


def _store(seen: Observed, spec: SandboxSpec) -> Plan:
    """Wait for the Job, also after the end of the pod: the Job may have stored everything before."""
    job = _job_of(seen, "store")
    if stale := [each for each in seen.jobs if each != job]:
        return Plan(deletes(seen, stale))
    if job is None or (job.state == "Running" and not job.has_begun):
        return _before_storing(seen, spec, job)
    if job.state == "Succeeded" and job.message.startswith(STORED_IN_PART):
        return _report(
            seen, "Warning", IN_PART, job.message, STORE_FAILED, condition(PARKED, False, IN_PART, job.message)
        )
    if job.state == "Succeeded" and not job.message and seen.pod is not None:
        # Its pod is gone, and with it the words that say whether everything is stored. Another try tells what is stored.
        return Plan(deletes(seen, (job,)))
    if job.state == "Succeeded":
        event = Event("Normal", PARKED, job.message or "its files are stored")
        return Plan(status=status.parked(seen, event.message).wire(), events=(event,))
    if job.state == "Failed":
        words = job.message or "the Job that stores its files failed"
        return _report(
            seen, "Warning", STORE_FAILED, words, STORE_FAILED, condition(PARKED, False, STORE_FAILED, words)
        )
    return _progress(seen, job, PARKING, STORING_WORDS)


def _before_storing(seen: Observed, spec: SandboxSpec, job: ParkingJob | None) -> Plan:
    """Make its executor still at once, so that it does not end itself before the Job begins. Until then, all can be
    undone.
    """
    pod, report = seen.pod, _report_of(seen, _number(seen))
    if pod is None:
        return steps.without_its_pod(seen)
    if ending := steps.ending(seen, pod, was_ready=True):
        return steps.finish(seen, ending)
    if spec.running or _is_released(seen):
        return _use_again(seen, spec, pod)
    if job is not None and (said := _progress(seen, job, PARKING, STORING_WORDS)).status is not None:
        return said
    wait = _unanswered(seen)
    is_asked = report is None or (not report.answered and not wait)
    asked = (_ask(seen, pod, Still(_number(seen))),) if is_asked else ()
    if job is None:
        created = _create_job(seen, spec, pod, "store")
        return replace(created, actions=(*asked, *created.actions))
    return Plan(asked, requeue_seconds=wait or NO_POD_AFTER.total_seconds())


def _use_again(seen: Observed, spec: SandboxSpec, pod: Manifest) -> Plan:
    """Let the executor of a pod that was not given back accept changes again; then it is Ready."""
    if seen.jobs:
        return Plan(deletes(seen, seen.jobs))
    if _is_released(seen):
        return _ready_again(seen, spec, pod)
    if wait := _unanswered(seen):
        return Plan(requeue_seconds=wait)
    return Plan((_ask(seen, pod, Still(_number(seen), is_still=False)),))


def _is_released(seen: Observed) -> bool:
    """Whether its executor has answered that it accepts changes again."""
    report = _report_of(seen, _number(seen))
    return report is not None and report.answered and not report.is_still


def _unanswered(seen: Observed) -> float:
    """Return the seconds until its executor is asked again after a question without an answer; else 0."""
    report = _report_of(seen, _number(seen))
    return 0.0 if report is None or report.answered else max(0.0, steps.seconds_left(report.at, UNANSWERED, seen.now))


def _after_failure(seen: Observed, spec: SandboxSpec) -> Plan:
    """Keep the pod. It is used again when `running` is true, once its executor is released."""
    if seen.pod is None:
        return _parked_in_part(seen, steps.without_its_pod(seen))
    if ending := steps.ending(seen, seen.pod, was_ready=True):
        return _parked_in_part(seen, steps.finish(seen, ending))
    if not spec.running:
        return Plan(deletes(seen, seen.jobs), requeue_seconds=steps.lost_in(seen))
    used = _use_again(seen, spec, seen.pod)
    return replace(used, requeue_seconds=steps.soonest(steps.lost_in(seen), used.requeue_seconds))


def _parked_in_part(seen: Observed, finished: Plan) -> Plan:
    """Return the plan of a Sandbox whose pod has ended: it is parked if a part is stored, and else `finished`."""
    parked = find(seen.status.conditions, PARKED)
    if finished.status is None or parked is None or parked.reason != IN_PART:
        return finished
    event = Event("Warning", PARKED, f"its pod has ended; {parked.message}")
    return Plan(status=status.parked(seen, parked.message).wire(), events=(event,))


def _stay_parked(seen: Observed) -> Plan:
    ready = find(seen.status.conditions, READY)
    if ready is None or ready.reason != PARKED:
        return _report(seen, None, PARKED, status.PARKED_WORDS, PARKED)
    return _drop(seen)


def _bring_back(seen: Observed, spec: SandboxSpec, parked: Condition) -> Plan:
    """Create a pod, and a Job for it. Everything that fails is deleted and created again, because the files are stored."""
    ready, pod = find(seen.status.conditions, READY), seen.pod
    if ready is None or ready.reason == PARKED:
        return _report(seen, None, RESTORING, RESTORING_WORDS, RESTORING)
    if pod is not None and _parked_since(pod) != parked.last_transition_time:
        return _drop(seen)
    job = _job_of(seen, "restore") if pod is not None else None
    if len(seen.jobs) > (job is not None):
        return Plan(deletes(seen, (other for other in seen.jobs if other != job)))
    if pod is None:
        return _create_pod(seen, spec, parked)
    if (words := exec_failure(pod)) is not None:
        return steps.recreate_with_copy(seen, pod, pod["spec"].get("nodeName", ""), words, PAUSE_SECONDS)
    started = parse_time(pod["metadata"]["creationTimestamp"])
    left = steps.seconds_left(started, timedelta(seconds=spec.start_seconds), seen.now)
    if ending := steps.ending(seen, pod, was_ready=False):
        return _begin_again(seen, pod, ending.reason.value, ending.message)
    if not is_running(pod):
        if left <= 0:
            return _begin_again(seen, pod, "StartDeadlineExceeded", f"its pod did not start in {spec.start_seconds} s")
        lost_in = steps.lost_in(seen)
        return steps.wait(seen, spec, pod, left if lost_in is None else min(left, lost_in))
    if job is None:
        return _create_job(seen, spec, pod, "restore")
    if job.state == "Failed":
        words = job.message or "the Job that brings its files back failed"
        return _begin_again(seen, pod, RESTORE_FAILED, words)
    if job.state == "Succeeded":
        return _ready_again(seen, spec, pod)
    if (said := _progress(seen, job, RESTORING, RESTORING_WORDS)).status is not None:
        return said
    look_again = None if job.has_begun else NO_POD_AFTER.total_seconds()
    return Plan(making.learned_refusals(seen), requeue_seconds=steps.soonest(steps.lost_in(seen), look_again))


def _create_pod(seen: Observed, spec: SandboxSpec, parked: Condition) -> Plan:
    if seen.restoring_pauses:
        return Plan(requeue_seconds=PAUSE_SECONDS)
    if seen.status.mode == WorkspaceMode.OVERLAY:
        # Only Overlay can bring its workspaces back.
        workspaces = spec.workspaces.model_copy(update={"mode": WorkspaceMode.OVERLAY})
        spec = spec.model_copy(update={"workspaces": workspaces})
    made = making.make_pod(seen, spec)
    if isinstance(made, making.Invalid):
        return steps.wait_to_be_admitted(seen, made.message, making.REFUSAL_SECONDS)
    since = parked.last_transition_time
    return Plan(tuple(_marked(action, since) for action in made), requeue_seconds=PAUSE_SECONDS)


def _marked(action: Action, since: str | None) -> Action:
    if not isinstance(action, Create) or action.body["kind"] != "Pod":
        return action
    metadata = action.body["metadata"]
    annotations = {**metadata.get("annotations", {}), PARKED_ANNOTATION: since}
    return replace(action, body={**action.body, "metadata": {**metadata, "annotations": annotations}})


def _parked_since(pod: Manifest) -> str | None:
    found: str | None = (pod["metadata"].get("annotations") or {}).get(PARKED_ANNOTATION)
    return found


def _begin_again(seen: Observed, pod: Manifest, reason: str, words: str) -> Plan:
    told = _report(seen, "Warning", reason, words, reason)
    if told.status is not None and told.status != seen.status.wire():
        return told
    if seen.restoring_pauses:
        return Plan(requeue_seconds=PAUSE_SECONDS)  # it was deleted, and something keeps it
    # Nothing in the pod is needed, and its node may never confirm its end.
    return Plan((_pause(seen), *deletes(seen, seen.jobs), steps.delete_pod(seen, pod, grace_seconds=0)))


def _pause(seen: Observed) -> Remember:
    return Remember(restoring_pauses(seen.uid), "", PAUSE_SECONDS)


def _drop(seen: Observed) -> Plan:
    """Delete its Jobs, and its pod, whose files are stored; without grace if the pod's node is lost."""
    actions, seconds = deletes(seen, seen.jobs), steps.lost_in(seen)
    if seen.pod is None:
        return Plan(actions)
    is_lost = seconds is not None and seconds <= 0
    if is_terminating(seen.pod) and not is_lost:
        return Plan(actions, requeue_seconds=seconds)
    return Plan((*actions, steps.delete_pod(seen, seen.pod, grace_seconds=0 if is_lost else None)))


def _ready_again(seen: Observed, spec: SandboxSpec, pod: Manifest) -> Plan:
    was_parked = holds(seen.status.conditions, PARKED)
    words = "its files are back" if was_parked else "it is used again, without having been parked"
    fresh = status.ready(seen, spec, pod, condition(PARKED, False, RESTORED, words))
    return Plan(status=fresh.wire(), events=(Event("Normal", RESTORED, words),))


def _report(seen: Observed, kind: Any, event: str, words: str, reason: str, *more: Condition) -> Plan:
    """Return the plan that writes why it is not ready, with an Event unless `kind` is None."""
    fresh = status.with_conditions(seen, [*more, condition(READY, False, reason, words)])
    return Plan(status=fresh.wire(), events=() if kind is None else (Event(kind, event, words),))


def _progress(seen: Observed, job: ParkingJob, reason: str, words: str) -> Plan:
    """Return the plan that writes whether the Job has a problem, unless Ready has that reason."""
    kind, event = None, ""
    if job.problem and not job.has_begun:
        kind, event, words = "Warning", f"{reason}Waits", f"the Job {job.name} has not begun: {job.problem}"
        reason = event
    ready = find(seen.status.conditions, READY)
    return Plan() if ready is not None and ready.reason == reason else _report(seen, kind, event, words, reason)


def _job_of(seen: Observed, what: str) -> ParkingJob | None:
    """Return the Job that does `what` for the current parking and the current pod, or a pod that no longer exists."""
    name, number = _job_name(seen, what), str(seen.status.parking)
    found = next((job for job in seen.jobs if (job.name, job.parking) == (name, number)), None)
    is_of_pod = found is not None and (seen.pod is None or found.pod_uid == uid_of(seen.pod))
    return found if is_of_pod else None


def _job_name(seen: Observed, what: str) -> str:
    return f"{seen.name}-{'park' if what == 'store' else 'unpark'}"


def _create_job(seen: Observed, spec: SandboxSpec, pod: Manifest, what: str) -> Plan:
    if seen.restoring_pauses:
        return Plan(requeue_seconds=PAUSE_SECONDS)
    # Also if the key is known: nothing may have mounted its Secret for long, and somebody may have deleted it.
    key = making.key_action(seen)
    return Plan((key,) if seen.key is None else (key, Create(job_for(seen, spec, pod, what))))


def job_for(seen: Observed, spec: SandboxSpec, pod: Manifest, what: str) -> Json:
    """Return the Job that does `store` or `restore` (agent_runtime/runner/parking.py) for this pod."""
    assert spec.parking is not None
    config = seen.config
    number, address = str(seen.status.parking), pod["status"]["podIP"]
    arguments = (what, number, seen.namespace, seen.name, seen.uid, address, str(spec.idle_seconds))
    command = ["python3", "-m", "agent_runtime.runner.parking", *arguments, spec.parking.uri]
    container = {
        **container_fields(spec.parking.secret_ref),
        "name": CONTAINER,
        "image": config.images.runtime,
        "imagePullPolicy": config.images.pull_policy,
        # Kubernetes expands $(NAME); `$$` is an escaped `$`.
        "command": [part.replace("$", "$$") for part in command],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {"cpu": config.runner.cpu, "memory": config.runner.memory}},
        "volumeMounts": [
            {"name": "key", "mountPath": RUNNER_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    items = [{"key": KEY_FILE, "path": KEY_FILE}]
    template = {
        **pod_fields(),
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "key", "secret": {"secretName": by_hand_name(seen.name), "items": items, "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    labels = {**MANAGED_BY, **parking_labels(seen.name)}
    job_spec = {
        "backoffLimit": RETRIES,
        "activeDeadlineSeconds": MOST_SECONDS,
        "template": {"metadata": {"labels": labels}, "spec": template},
    }
    owner = owner_reference("Sandbox", seen.name, seen.uid)
    body = owned_object("Job", _job_name(seen, what), seen.namespace, owner, labels, spec=job_spec)
    body["metadata"]["annotations"] = {POD_ANNOTATION: uid_of(pod), PARKING_ANNOTATION: number}
    return body
