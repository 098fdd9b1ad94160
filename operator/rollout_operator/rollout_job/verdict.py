"""Decide whether a job has succeeded or failed.

Each runner decides for its own shard and reports it. A job also fails after a number of consecutive failures of runner
pods without a new result (`failure_limit`).
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from rollout_api.rollout_job import Restarts, RunnerState
from rollout_operator.conditions import parse_time
from rollout_operator.rollout_job.observe import Observed

FAILURES_WITHOUT_RESULT = 10
"""Failures that fail a job with few runners. Kubernetes' back-off doubles from 10 s to 10 min, so 10 starts of one runner
take about 40 min.
"""

FAILURES_OF_EACH = 3
"""Failures for each runner, for jobs with many runners. A short outage of the store ends all runners at the same time,
which alone must not fail the job.
"""


def count_from(
    before: Restarts | None, failed_pods: int, sealed: int, *, suspended: bool, disrupted_pods: int = 0, drains: int = 0
) -> Restarts:
    """Return the counters from which failures are counted: those at the last new result.

    `disrupted_pods`: pods that Kubernetes ended and that were not counted before. Their cause is not the job. `drains`: how
    often runners were asked to end, as they report it.
    Pods that a suspension ends do not count as failures. If there are fewer failed pods than before, the Job was deleted
    and created again, and the count starts again.
    """
    if before is None or suspended or sealed > before.sealed or failed_pods < before.failed_pods:
        return Restarts(failed_pods=failed_pods, sealed=sealed, drains=drains or None)
    if not disrupted_pods:
        return before
    return before.model_copy(update={"disrupted_pods": (before.disrupted_pods or 0) + disrupted_pods})


def failures_since(since: Restarts, failed_pods: int, drains: int = 0) -> int:
    # A disrupted pod may be seen before the Job counts it, and is seen again by an operator that takes over. Most of them
    # drain. One that is deleted while no operator runs is known by its report alone.
    no_failures = max(since.disrupted_pods or 0, drains - (since.drains or 0))
    return max(0, failed_pods - since.failed_pods - no_failures)


def failure_limit(runners_at_work: int) -> int:
    """Return the number of consecutive failures that fails a job with this many unfinished runners."""
    return max(FAILURES_WITHOUT_RESULT, FAILURES_OF_EACH * runners_at_work)


REPORT_GRACE: Final = timedelta(seconds=180)
"""Time to wait for reports after the end of the Job. Reports and the Job come through separate watches, and a broken watch
is noticed only after 120 s (SILENCE_SECONDS).
"""

NO_VERDICT: Final = "NoVerdict"
"""Reason of a failure because reports are missing."""

RUNNERS_FAIL: Final = "RunnersFail"
"""Reason of a failure that a person can revert after fixing the cause, by suspending and resuming the job."""


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    condition: Literal["Succeeded", "Failed"]
    reason: str
    message: str
    since: datetime | None = None
    """When the verdict was written into the status; None for a new verdict."""


def is_reverted(seen: Observed) -> bool:
    """Whether a person reverts the verdict RunnersFail by suspending the job."""
    failed = seen.condition("Failed")
    return bool(failed.get("status") == "True" and failed["reason"] == RUNNERS_FAIL and seen.spec.get("suspend"))


def standing_verdict(seen: Observed) -> Verdict | None:
    """Return the verdict in the status, unless it was reverted or the missing reports have arrived."""
    for kind in ("Succeeded", "Failed"):
        found = seen.condition(kind)
        is_outdated = found.get("reason") == NO_VERDICT and len(_done(seen)) == seen.replicas
        if found.get("status") == "True" and not is_reverted(seen) and not is_outdated:
            since = parse_time(found["lastTransitionTime"])
            return Verdict("Succeeded" if kind == "Succeeded" else "Failed", found["reason"], found["message"], since)
    return None


def judge(seen: Observed, failures: int) -> Verdict | None:
    """Return a new verdict; None if the job goes on. `failures` are consecutive ones without a new result."""
    reports = seen.reports
    for report in reports:
        if report.state is RunnerState.ABORTED:
            return Verdict("Failed", "Aborted", report.message or f"runner {report.index} aborted its shard")
    if seen.batch_job is None:
        return None
    if seen.batch_job.given_up is not None:
        reason, message = seen.batch_job.given_up
        return Verdict("Failed", reason, f"Kubernetes failed the runners' Job: {message}")
    if seen.batch_job.completed is not None:
        return _of_complete_job(seen, seen.batch_job.completed)
    if failures >= failure_limit(seen.runners_at_work):
        return Verdict("Failed", RUNNERS_FAIL, _failure_message(seen, failures))
    return None


def lacks_reports(seen: Observed) -> bool:
    """Whether reports of successful runners were deleted. The runners then run again, find all rollouts sealed, and
    report.

    This is True at most once for each deletion, because the new Job is newer than the RolloutShards.
    """
    job = seen.batch_job
    return (
        job is not None and job.completed is not None and seen.reports_deleted and not _may_be_late(seen, job.completed)
    )


def last_failure(seen: Observed) -> str:
    failed = [pod for pod in seen.pods if pod.failure is not None]
    if not failed:
        return "its pod was deleted, so the reason is unknown"
    last = max(failed, key=lambda pod: pod.ended)
    return f"runner {last.index}: {last.failure}"


def _done(seen: Observed) -> list[int]:
    return [report.index for report in seen.reports if report.state is RunnerState.COMPLETED]


def _may_be_late(seen: Observed, completed: datetime) -> bool:
    return seen.now < completed + REPORT_GRACE


def _of_complete_job(seen: Observed, completed: datetime) -> Verdict | None:
    done = _done(seen)
    if len(done) == seen.replicas:
        losses = [f"runner {report.index}: {report.message}" for report in seen.reports if report.message]
        return Verdict("Succeeded", "Completed", "; ".join(["all runners have completed their shards", *losses]))
    if _may_be_late(seen, completed) or seen.reports_deleted:
        return None
    silent = sorted(set(range(seen.replicas)) - set(done))
    named = ", ".join(map(str, silent[:10])) + (", …" if len(silent) > 10 else "")
    message = (
        f"all runner pods succeeded, but runners {named} did not report that their shard is complete; "
        f"sealed rollouts are in {seen.status.get('resultURI', 'storage')}"
    )
    return Verdict("Failed", NO_VERDICT, message)


def _failure_message(seen: Observed, failures: int) -> str:
    name, namespace = seen.ref.name, seen.ref.namespace
    return (
        f"{failures} runner pods failed in a row without a new result, the last one: {last_failure(seen)}. Results so far "
        f"are kept. Fix the cause, then resume: kubectl patch rolloutjob {name} -n {namespace} --type merge -p "
        '\'{"spec":{"suspend":true}}\', and then the same with false'
    )
