"""The status of a RolloutJob: the sum of its runners' reports, and its conditions. Also the Events for changes of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout_api.cluster import runner_name
from rollout_api.conditions import Condition
from rollout_api.manifest import Problem
from rollout_api.rollout_job import Restarts, RolloutJobStatus, RunnerReport
from rollout_operator.actions import Event
from rollout_operator.conditions import condition, with_timestamps
from rollout_operator.rollout_job.observe import Observed
from rollout_operator.rollout_job.verdict import Verdict, failure_limit, last_failure

REWARD_DIGITS = 6
"""Digits of the mean reward. Further digits would depend on the order in which rewards are added."""


@dataclass(frozen=True)
class Totals:
    """Sums over the shards."""

    total: int | None
    """Number of rollouts; None while unknown."""
    sealed: int
    running: int
    outcomes: dict[str, int]
    mean_reward: float | None
    token_forks: int

    def __str__(self) -> str:
        of = f" of {self.total}" if self.total is not None else ""
        working = f", {self.running} running" if self.running else ""
        return f"{self.sealed}{of} rollouts sealed{working}"


def add_up(reports: Sequence[RunnerReport], replicas: int, listed: int | None) -> Totals:
    """Add up the reports of distinct runners. `listed`: number of rollouts if the manifest lists all tasks."""
    outcomes: dict[str, int] = {}
    for report in reports:
        for outcome, count in report.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    sealed = sum(report.sealed for report in reports)
    reported = [report.total for report in reports if report.total is not None]
    total = sum(reported) if len(reported) == replicas else listed
    if total is not None:
        # Reports are from different times, and a total must not be lower than its parts.
        total = max(total, sealed, sum(outcomes.values()))
    rewarded = sum(report.rewarded for report in reports)
    mean = sum(report.reward_sum / rewarded for report in reports if report.rewarded) if rewarded else None
    return Totals(
        total=total,
        sealed=sealed,
        running=sum(report.running for report in reports),
        outcomes=dict(sorted(outcomes.items())),
        mean_reward=None if mean is None else round(mean, REWARD_DIGITS),
        token_forks=sum(report.token_forks for report in reports),
    )


MESSAGE_CHARACTERS: Final = 4096
"""Longest message of a condition (rollout_api.conditions)."""

INVALID, DRAINING, SUSPENDED, RESTARTED = "InvalidSpec", "Draining", "Suspended", "RunnerRestarted"
HELD, RESUMED = "SuspendedByAnotherManager", "ResumedByAnotherManager"
WAITING_FOR_MODEL = "WaitingForModel"


@dataclass(frozen=True)
class Findings:
    """Results of the plan from which the status is written."""

    totals: Totals
    restarts: Restarts | None
    failures: int = 0
    """Runner pods that failed since the last new result."""
    verdict: Verdict | None = None
    problems: Sequence[Problem] = ()
    waits_for_model: str | None = None
    """Why the runners of a valid job must wait for their model."""
    lost_server: bool = False
    """Whether the job's own ModelServer was deleted."""
    drained: bool = False
    """Whether the job is suspended and has no runners left."""
    result_uri: str | None = None


def status_of(seen: Observed, found: Findings) -> dict[str, Any]:
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


_OWN_CONDITIONS: Final = frozenset(("Ready", "Progressing", "Succeeded", "Failed", "Suspended", "Invalid"))


def own_part(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without conditions of other writers, which an apply keeps."""
    conditions = [found for found in status.get("conditions", ()) if found["type"] in _OWN_CONDITIONS]
    return {**status, "conditions": conditions} if "conditions" in status else dict(status)


def differs_in_counts_only(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether only counts and messages changed, so that the write can wait."""
    return bool(_urgent(before) == _urgent(now))


def _urgent(status: Mapping[str, Any]) -> Any:
    """Return the parts of a status whose change is written immediately."""
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
    restarts = status.get("restarts") or {}
    # A disrupted pod may be gone when other counts are written.
    pods = [restarts.get(field) for field in ("failedPods", "disruptedPods")]
    others = {field: status.get(field) for field in ("observedGeneration", "resultURI")}
    return conditions, pods, others


def _condition(seen: Observed, generation: int | None, kind: str, holds: bool, reason: str, message: str) -> Condition:
    before = seen.condition(kind)
    fresh = condition(kind, holds, reason, message, MESSAGE_CHARACTERS)
    return with_timestamps(fresh, Condition.model_validate(before) if before else None, seen.now, generation)


Claim = tuple[str, bool, str, str]
"""Type, whether it is true, reason, message."""


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
        claims.append(("Invalid", True, INVALID, "the job was not started: " + "; ".join(map(str, found.problems))))
    return claims


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
    message = f"{up} of {wanted} runners with unfinished work are ready"
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
        return (
            True,
            RESTARTED,
            f"{last_failure(seen)} ({times}, {failure_limit(seen.runners_at_work)} in a row fail the job)",
        )
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
        return True, SUSPENDED, "spec.suspend is set; set it to false to resume"
    if seen.batch_job is not None and seen.batch_job.suspend_set and not seen.batch_job.suspend:
        return False, RESUMED, f"spec.suspend is set, but another manager resumed Job {runner_name(seen.ref.name)}"
    return False, DRAINING, "spec.suspend is set; running turns are finished first, then sandboxes are deleted"


def events_of(seen: Observed, found: Findings, status: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the Events for the changes in a status that is about to be written."""
    return tuple(_events(seen, found, {condition["type"]: condition for condition in status["conditions"]}))


def _events(seen: Observed, found: Findings, now: Mapping[str, Mapping[str, Any]]) -> Iterator[Event]:
    def begins(kind: str) -> bool:
        return _holds(now.get(kind, {})) and not _holds(seen.condition(kind))

    if (invalid := now.get("Invalid")) and invalid["message"] != seen.condition("Invalid").get("message"):
        yield Event("Warning", "InvalidSpec", invalid["message"])
    if begins("Progressing") and found.verdict is None and not seen.suspend:
        yield from _started(seen, found)
    if found.lost_server and found.waits_for_model != seen.condition("Progressing").get("message"):
        yield Event("Warning", "ModelServerDeleted", f"{found.waits_for_model}; set its policy again")
    if _restarted(seen, found, now["Progressing"]):
        yield Event("Warning", "RunnerRestarted", f"a runner failed and is restarted: {last_failure(seen)}")
    if begins("Suspended"):
        yield Event("Normal", "Suspended", f"all runners have ended and all sandboxes are deleted; {found.totals}")
    if begins("Succeeded"):
        yield Event("Normal", "Succeeded", f"{_summary(found)}; results are in {found.result_uri}")
    if begins("Failed"):
        failed = now["Failed"]
        yield Event("Warning", "Failed", f"{failed['reason']}: {failed['message']}; {_summary(found)}")


def _started(seen: Observed, found: Findings) -> Iterator[Event]:
    if _holds(seen.condition("Suspended")):
        yield Event("Normal", "Resumed", f"runners resume: {found.totals}")
    else:
        runners = "1 runner" if seen.replicas == 1 else f"{seen.replicas} runners"
        rollouts = f" for {found.totals.total} rollouts" if found.totals.total is not None else ""
        yield Event("Normal", "Started", f"starting {runners}{rollouts}; results go to {found.result_uri}")


def _restarted(seen: Observed, found: Findings, progressing: Mapping[str, Any]) -> bool:
    if found.verdict is not None or seen.suspend or seen.held:
        return False
    written = seen.condition("Progressing")
    if found.failures:
        return bool(progressing["reason"] == RESTARTED and progressing["message"] != written.get("message"))
    # A new result arrived together with the failure, so the failure count is 0 and the failure was not reported yet.
    before, after = seen.restarts, found.restarts
    if before is None or after is None or written.get("reason") == RESTARTED:
        return False
    return after.failed_pods > before.failed_pods


def _summary(found: Findings) -> str:
    totals = found.totals
    by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in totals.outcomes.items())
    reward = f"mean reward {totals.mean_reward:g}" if totals.mean_reward is not None else ""
    return "; ".join(filter(None, (str(totals), by_outcome, reward)))


def _holds(condition: Mapping[str, Any]) -> bool:
    return bool(condition.get("status") == "True")
