"""The status of a RolloutJob."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout_api.cluster import runner_name
from rollout_api.conditions import Condition
from rollout_api.manifest import Problem
from rollout_api.rollout_job import Restarts, RolloutJobStatus
from rollout_operator.rollout_job.failure_limit import limit
from rollout_operator.rollout_job.observe import Observed
from rollout_operator.rollout_job.totals import Totals
from rollout_operator.rollout_job.verdict import Verdict, last_failure

MESSAGE_CHARACTERS: Final = 4096
"""Bound of a condition's message in the contract."""

INVALID, DRAINING, SUSPENDED, RESTARTED = "InvalidSpec", "Draining", "Suspended", "RunnerRestarted"
HELD, RESUMED = "SuspendedByAnotherManager", "ResumedByAnotherManager"
WAITING_FOR_MODEL = "WaitingForModel"


@dataclass(frozen=True)
class Findings:
    """What the plan has found out, from which the status is written."""

    totals: Totals
    restarts: Restarts | None
    failures: int = 0
    """Runner pods that failed since the last new result."""
    verdict: Verdict | None = None
    problems: Sequence[Problem] = ()
    """Why the job cannot be started."""
    waits_for_model: str | None = None
    """Why no runner is made yet, or again, though nothing is wrong with the job."""
    drained: bool = False
    """It is suspended, and no runner is left."""
    result_uri: str | None = None


def status_of(seen: Observed, found: Findings) -> dict[str, Any]:
    """The status as JSON."""
    generation = seen.manifest["metadata"].get("generation")
    started = not found.problems
    return RolloutJobStatus(
        observed_generation=generation,
        conditions=[_condition(seen, generation, *claim) for claim in _claims(seen, found)],
        total=found.totals.total,
        sealed=found.totals.sealed if started else None,
        outcomes=found.totals.outcomes if started else None,
        mean_reward=found.totals.mean_reward,
        token_forks=found.totals.token_forks if started else None,
        restarts=found.restarts,
        result_uri=found.result_uri,
    ).wire()


def differs_in_counts_only(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the news can wait a little: numbers and words changed, and no condition."""
    return bool(_news(before) == _news(now))


def _news(status: Mapping[str, Any]) -> Any:
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
    failed_pods = (status.get("restarts") or {}).get("failedPods")
    others = {field: status.get(field) for field in ("observedGeneration", "resultURI")}
    return conditions, failed_pods, others


def _condition(seen: Observed, generation: int | None, kind: str, holds: bool, reason: str, message: str) -> Condition:
    before, status = seen.condition(kind), "True" if holds else "False"
    unchanged = before.get("status") == status and "lastTransitionTime" in before
    return Condition(
        type=kind,
        status="True" if holds else "False",
        reason=reason,
        message=message[:MESSAGE_CHARACTERS],
        observed_generation=generation,
        last_transition_time=before["lastTransitionTime"] if unchanged else seen.now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


Claim = tuple[str, bool, str, str]
"""Type, whether it holds, reason, message."""


def _claims(seen: Observed, found: Findings) -> list[Claim]:
    verdict = found.verdict
    ended = {kind: verdict for kind in ("Succeeded", "Failed") if verdict and verdict.condition == kind}
    claims: list[Claim] = [
        ("Ready", *_ready(seen, found)),
        ("Progressing", *_progressing(seen, found)),
        *(
            (kind, True, ended[kind].reason, ended[kind].message) if kind in ended else (kind, False, f"Not{kind}", "")
            for kind in ("Succeeded", "Failed")
        ),
        ("Suspended", *_suspended(seen, found)),
    ]
    if found.problems:
        claims.append(("Invalid", True, INVALID, _told(found.problems)))
    return claims


def _told(problems: Sequence[Problem]) -> str:
    message = "nothing was started: " + "; ".join(map(str, problems))
    return message if len(message) <= MESSAGE_CHARACTERS else message[: MESSAGE_CHARACTERS - 1] + "…"


def _ready(seen: Observed, found: Findings) -> tuple[bool, str, str]:
    if found.problems:
        return False, INVALID, ""
    if found.drained and found.verdict is None:
        return False, SUSPENDED, ""
    if found.waits_for_model is not None:
        return False, WAITING_FOR_MODEL, found.waits_for_model
    wanted = seen.runners_at_work
    if found.verdict is not None or wanted == 0:
        return False, "RunnersFinished", ""
    up = sum(pod.ready for pod in seen.pods)
    message = f"{up} of {wanted} runners that have work are up"
    if up >= wanted:
        return True, "RunnersUp", message
    troubled = sorted((pod for pod in seen.pods if pod.trouble), key=lambda pod: pod.index)
    if not troubled or troubled[0].trouble is None:
        if (lacking := wanted - seen.alive) > 0 and seen.batch_job is not None:
            name, namespace = runner_name(seen.ref.name), seen.ref.namespace
            message += f"; {lacking} have no pod yet: kubectl describe job {name} -n {namespace}"
        return False, "RunnersStarting", message
    reason, words = troubled[0].trouble
    return False, reason, f"{message}; runner {troubled[0].index} waits: {words or reason}"


def _progressing(seen: Observed, found: Findings) -> tuple[bool, str, str]:
    if found.problems:
        return False, INVALID, ""
    if found.verdict is not None:
        failed = found.verdict.condition == "Failed"
        if failed and seen.alive:
            return True, "Ending", f"the job has failed; {seen.alive} runners are still ending"
        return False, found.verdict.condition, str(found.totals)
    if seen.suspend or seen.held:
        if found.drained and seen.sandboxes:
            return True, DRAINING, f"{len(seen.sandboxes)} sandboxes are being deleted"
        if found.drained:
            return False, SUSPENDED, str(found.totals)
        return True, DRAINING, f"{seen.alive} runners finish their running turns"
    if found.waits_for_model is not None:
        return True, WAITING_FOR_MODEL, found.waits_for_model
    if found.failures:
        times = f"{found.failures} failure{'s' * (found.failures > 1)} since the last new result"
        return True, RESTARTED, f"{last_failure(seen)} ({times}, {limit(seen.runners_at_work)} in a row fail the job)"
    if not seen.reports:
        up, reason, message = _ready(seen, found)
        return (True, "RunnersStarting", "no runner has reported yet") if up else (True, reason, message)
    waits = [f"runner {report.index}: {report.message}" for report in seen.reports if report.message]
    return True, "RolloutsRunning", "; ".join([str(found.totals), *waits])


def _suspended(seen: Observed, found: Findings) -> tuple[bool, str, str]:
    if not (seen.suspend or seen.held) or found.verdict is not None or found.problems:
        return False, "NotSuspended", ""
    if seen.held:
        message = f"another manager suspended Job {runner_name(seen.ref.name)}; runners resume when it resumes the Job"
        return found.drained and not seen.sandboxes, HELD, message
    if found.drained and not seen.sandboxes:
        return True, SUSPENDED, "spec.suspend is set; set it to false to go on"
    if seen.batch_job is not None and seen.batch_job.suspend_set and not seen.batch_job.suspend:
        return False, RESUMED, f"spec.suspend is set, but another manager resumed Job {runner_name(seen.ref.name)}"
    return False, DRAINING, "spec.suspend is set; running turns are finished first, then sandboxes are deleted"
