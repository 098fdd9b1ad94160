"""Decide whether a job has succeeded or failed. Each runner decides for its own shard; Kubernetes only runs them.

A job fails after ten failures of runners in a row without a new result.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from rollout_api.rollout_job import Restarts, RunnerState
from rollout_operator.conditions import parse_time
from rollout_operator.rollout_job.observe import Observed

FAILURES_WITHOUT_RESULT = 10
"""Kubernetes' back-off doubles from 10 s to 10 min: ten starts of one runner take some 40 min."""

FAILURES_OF_EACH = 3
"""Failures of each runner, for jobs with many: a short outage of the store ends all of them at once, which alone must
not fail the job.
"""


def count_from(before: Restarts | None, failed_pods: int, sealed: int, *, suspended: bool) -> Restarts:
    """Return the time from which failures are counted: that of the last new result. Pods that a suspension ends do not
    count.

    Pods that a suspension ends do not count as failures. Fewer failed pods than before mean that somebody deleted the
    Job, and
    the count has started again.
    """
    if before is None or suspended or sealed > before.sealed or failed_pods < before.failed_pods:
        return Restarts(failed_pods=failed_pods, sealed=sealed)
    return before


def failures_since(since: Restarts, failed_pods: int) -> int:
    return failed_pods - since.failed_pods


def failure_limit(runners_at_work: int) -> int:
    """Return the number of consecutive failures that fails a job with so many runners."""
    return max(FAILURES_WITHOUT_RESULT, FAILURES_OF_EACH * runners_at_work)


REPORT_GRACE: Final = timedelta(seconds=180)
"""A runner reports before it ends. Its report and the end of the Job come through two watches, in any order: one whose
connection is dead is noticed after 120 s (SILENCE_SECONDS)."""

NO_VERDICT: Final = "NoVerdict"
"""The only failure that means that reports are missing."""

RUNNERS_FAIL: Final = "RunnersFail"
"""The only failure that a person can fix and revert, by suspending and resuming the job."""


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    condition: Literal["Succeeded", "Failed"]
    reason: str
    message: str
    since: datetime | None = None
    """When it was first reported; None for a new one."""


def is_taken_back(seen: Observed) -> bool:
    """Whether a person has just suspended a job whose runners failed."""
    said = seen.condition("Failed")
    return bool(said.get("status") == "True" and said["reason"] == RUNNERS_FAIL and seen.spec.get("suspend"))


def standing_verdict(seen: Observed) -> Verdict | None:
    """Return the earlier verdict. It stays unless it was taken back or the missing reports have arrived."""
    for kind in ("Succeeded", "Failed"):
        said = seen.condition(kind)
        is_outdated = said.get("reason") == NO_VERDICT and len(_done(seen)) == seen.replicas
        if said.get("status") == "True" and not is_taken_back(seen) and not is_outdated:
            since = parse_time(said["lastTransitionTime"])
            return Verdict("Succeeded" if kind == "Succeeded" else "Failed", said["reason"], said["message"], since)
    return None


def judge(seen: Observed, failures: int) -> Verdict | None:
    """Return the verdict, if there is one. `failures`: consecutive failures without a new result, from `count_from`."""
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
        return Verdict("Failed", RUNNERS_FAIL, _hopeless(seen, failures))
    return None


def lacks_reports(seen: Observed) -> bool:
    """Whether reports of successful runners were deleted. Runners that start again find all rollouts sealed and report.

    At most once for each deletion: with a Job that is newer than all RolloutShards, a missing report never was there.
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
        return Verdict("Succeeded", "Completed", "; ".join(["every runner has completed its shard", *losses]))
    if _may_be_late(seen, completed) or seen.reports_deleted:
        return None
    silent = sorted(set(range(seen.replicas)) - set(done))
    named = ", ".join(map(str, silent[:10])) + (", …" if len(silent) > 10 else "")
    message = (
        f"all runner pods ended well, but not all of them said that their part is complete (runners {named}); "
        f"what was sealed is in {seen.status.get('resultURI', 'storage')}"
    )
    return Verdict("Failed", NO_VERDICT, message)


def _hopeless(seen: Observed, failures: int) -> str:
    name, namespace = seen.ref.name, seen.ref.namespace
    return (
        f"{failures} runner pods failed in a row without a new result, the last one: {last_failure(seen)}. Results so far "
        f"are kept. Fix the cause, then resume: kubectl patch rolloutjob {name} -n {namespace} --type merge -p "
        '\'{"spec":{"suspend":true}}\', and then the same with false'
    )
