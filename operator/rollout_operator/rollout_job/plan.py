"""Plan a RolloutJob, from its start to its deletion some time after its end."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from rollout_api.cluster import runner_name
from rollout_api.conditions import Metadata
from rollout_api.on_cluster.resolve import Resolved, resolve
from rollout_api.rollout_job import FINISHED_JOB_SECONDS, RolloutJob
from rollout_operator.actions import Action, Create, Delete, EnsureKey, Patch, Plan, ReadKey, Ref, Remember
from rollout_operator.rollout_job import model_server
from rollout_operator.rollout_job.observe import (
    GONE_AFTER,
    Observed,
    RunnerPod,
    counts_fact,
    disruption_fact,
    secret_fact,
)
from rollout_operator.rollout_job.runner_objects import (
    access,
    runner_count,
    runner_job,
    runner_policy,
    secret,
    shards,
    suspension,
)
from rollout_operator.rollout_job.status import Findings, add_up, differs_in_counts_only, events_of, own_part, status_of
from rollout_operator.rollout_job.verdict import (
    REPORT_GRACE,
    RUNNERS_FAIL,
    Verdict,
    count_from,
    failure_limit,
    failures_since,
    is_reverted,
    judge,
    lacks_reports,
    standing_verdict,
)


def seconds_left(ended: datetime | None, ttl_seconds: int, now: datetime) -> float | None:
    """Return the seconds until a job is deleted, at least 0; None if it is kept or has not ended."""
    if ended is None or ttl_seconds < 0:
        return None
    return max(0.0, (ended + timedelta(seconds=ttl_seconds) - now).total_seconds())


COUNTS_SECONDS: Final = 10
"""Interval between writes that change only counts. Runners report every second, and each write makes the API server store
the whole job with its tasks.
"""

DISRUPTION_SECONDS: Final = 86_400
"""Time for which a disrupted pod counts once. Counting it again would only delay the end of a job that fails."""

SILENT_SECONDS: Final = 30
"""Time for runner pods to be created and to start. Later the operator checks whether the objects that they need exist."""
SECRET_SECONDS: Final = 60
"""Interval between these checks."""


def plan(seen: Observed) -> Plan:
    """Plan the next step: start, suspend, resume, clean up or delete; and the status."""
    if "deletionTimestamp" in seen.manifest["metadata"]:
        return Plan()  # garbage collection deletes its objects
    standing = standing_verdict(seen)
    ttl = seen.spec.get("ttlSecondsAfterFinished", FINISHED_JOB_SECONDS)
    left = seconds_left(standing.since if standing else None, ttl, seen.now)
    if left == 0:
        return Plan(actions=(Delete(seen.ref, seen.uid),))

    resolved = resolve(seen.manifest, seen.config, seen.model_server) if _starts(seen, standing) else Resolved(None)
    if resolved.job is not None and not seen.has_key:
        return Plan(actions=(EnsureKey(secret(resolved.job)),))

    found = _findings(seen, standing, resolved)
    actions: list[Action] = []
    if resolved.job is not None:
        actions += _start(resolved.job, seen)
    if seen.batch_job is not None and found.verdict is None:
        actions += _missing_objects(seen)
    actions += _suspend_or_resume(seen, found)
    actions += _restore(seen, found)
    ended = found.verdict is not None and not seen.alive
    if found.drained or ended:
        actions += [Delete(ref, uid) for ref, uid in seen.sandboxes]
    can_resume = found.verdict is not None and found.verdict.reason == RUNNERS_FAIL
    is_paused = (found.drained and seen.suspend) or (ended and can_resume)
    actions += model_server.release_accelerators(seen, ended=ended and not can_resume, paused=is_paused)
    return _with_status(seen, found, actions, left)


def needs_spec(seen: Observed) -> bool:
    """Whether the plan resolves the job, for which it needs the whole spec."""
    standing = standing_verdict(seen)
    return "deletionTimestamp" not in seen.manifest["metadata"] and (
        _starts(seen, standing)
        or bool(_silent(seen))
        or _may_lack_account(seen)
        or (standing is None and model_server.is_lost(seen))
    )


def _starts(seen: Observed, standing: Verdict | None) -> bool:
    return seen.batch_job is None and standing is None


def _silent(seen: Observed) -> list[RunnerPod]:
    """Return runner pods that may wait for a missing Secret, unless the Secret was checked recently."""
    if seen.batch_job is None or seen.secret_checked:
        return []
    return [pod for pod in seen.pods if pod.silent is not None and pod.silent >= SILENT_SECONDS]


def _lacks_pods(seen: Observed) -> bool:
    """Whether Kubernetes should have created more runner pods than exist."""
    job = seen.batch_job
    return job is not None and not job.suspend and job.completed is None and seen.alive < seen.runners_at_work


def _may_lack_account(seen: Observed) -> bool:
    """Whether runner pods are missing, possibly because their ServiceAccount was deleted. False shortly after the last
    check.
    """
    job = seen.batch_job
    is_new = job is None or (seen.now - job.created).total_seconds() < SILENT_SECONDS
    return _lacks_pods(seen) and not is_new and not seen.secret_checked


def _missing_objects(seen: Observed) -> Iterator[Action]:
    """Create the NetworkPolicy and the RolloutShards if they do not exist, also after they were deleted."""
    job = Metadata(name=seen.ref.name, namespace=seen.ref.namespace, uid=seen.uid)
    if not seen.has_policy:
        yield Create(runner_policy(job))
    if len(seen.shards) < seen.replicas:
        wanted = shards(job, seen.replicas)
        yield from (Create(shard) for shard in wanted if shard["metadata"]["name"] not in seen.shards)


def _findings(seen: Observed, standing: Verdict | None, resolved: Resolved) -> Findings:
    totals = add_up(seen.reports, seen.replicas, seen.listed_rollouts)
    suspend = seen.suspend or seen.held
    job, restarts, failures = seen.batch_job, seen.restarts, 0
    drains = sum(report.drains for report in seen.reports)
    if job is not None:
        restarts = count_from(
            restarts,
            job.failed_pods,
            totals.sealed,
            suspended=suspend,
            disrupted_pods=len(seen.disrupted),
            drains=drains,
        )
        failures = failures_since(restarts, job.failed_pods, drains)
    verdict = standing or judge(seen, failures)
    lost_server = verdict is None and model_server.is_lost(seen)
    to_resume = job is not None and job.suspend_set and not suspend and verdict is None
    return Findings(
        totals=totals,
        restarts=restarts,
        failures=failures,
        verdict=verdict,
        problems=resolved.problems,
        waits_for_model=model_server.waiting(seen) if resolved.job is not None or to_resume or lost_server else None,
        lost_server=lost_server,
        drained=suspend and not seen.alive and (job.suspended if job is not None else not resolved.problems),
        result_uri=seen.status.get("resultURI") or resolved.result_uri,
    )


def _start(job: RolloutJob, seen: Observed) -> Iterator[Action]:
    """Start the job. The runners' Job is created last, when everything that its pods need exists and the model is ready."""
    server = model_server.own_server(job)
    if server is not None and seen.model_server is None:
        yield Create(server)
    if model_server.waiting(seen) is not None:
        return
    for body in access(job, seen.config):
        yield Create(body)
    yield from _missing_objects(seen)
    labels = seen.manifest["metadata"].get("labels") or {}
    yield Create(runner_job(job, seen.config, suspend=seen.suspend, job_labels=labels, pools=seen.pools))


def _suspend_or_resume(seen: Observed, found: Findings) -> Iterator[Action]:
    """Set the Job's `suspend` when the RolloutJob's value has changed. Otherwise values of other managers, such as Kueue,
    are kept. Also restore the number of runners, and delete a Job that must be created again.
    """
    job, suspend = seen.batch_job, seen.suspend
    if job is None:
        return
    ref = Ref("Job", seen.ref.namespace, runner_name(seen.ref.name))
    if found.verdict is None and lacks_reports(seen):
        yield Delete(ref, job.uid)
        return
    if job.completed is not None or job.given_up is not None:
        return
    if is_reverted(seen):
        # A new Job has no back-off. Kubernetes would delay the next pod of the old one by up to 10 min. The old Job stays
        # until its pods have ended, because they may still drain and need their sandboxes.
        yield Delete(ref, job.uid, foreground=seen.alive > 0)
        return
    if job.leaving:
        # A pod on a lost node never ends, so the Job is deleted without waiting for it.
        if not seen.alive:
            yield Delete(ref, job.uid)
        return
    is_lowered_by_queue = job.may_admit_fewer and 0 < job.parallelism < seen.replicas
    is_edited = job.completions != seen.replicas or (job.parallelism != seen.replicas and not is_lowered_by_queue)
    if is_edited and found.verdict is None:
        # Runners without a shard fail for ever, and shards without a runner never complete. With parallelism 0 none runs.
        yield Patch(ref, runner_count(seen.replicas))
    changed = suspend != job.suspend_set
    if found.verdict is not None:
        # A job that has ended must not start pods again, so it is suspended. Runners without a final report are left to
        # end by themselves, unless there were too many failures.
        ended = not seen.alive and not seen.runners_at_work
        suspend = suspend or job.suspend or ended or found.failures >= failure_limit(seen.runners_at_work)
        changed = suspend != job.suspend
    if changed and found.waits_for_model is None:
        yield Patch(ref, suspension(suspend=suspend))


def _restore(seen: Observed, found: Findings) -> Iterator[Action]:
    """Create deleted objects again that runner pods need.

    Without the ServiceAccount Kubernetes creates no pods. Without the Role runners fail. Without the Secret a pod waits
    and reports no reason. Without the job's own ModelServer runners wait for ever.
    """
    silent, misses_account = _silent(seen), _may_lack_account(seen)
    if found.verdict is not None or not (silent or misses_account or found.lost_server):
        return
    resolved = resolve(seen.manifest, seen.config, seen.model_server)
    if found.lost_server and resolved.job is not None and (server := model_server.own_server(resolved.job)):
        yield Create(server)
    if not (silent or misses_account):
        return
    if misses_account and resolved.job is not None:
        yield from (Create(body) for body in access(resolved.job, seen.config))
    if silent:
        yield _restored_secret(seen, found, resolved, in_use=bool(seen.sandboxes) or len(silent) < seen.alive)
    yield Remember(secret_fact(seen.uid), "", SECRET_SECONDS)


def _restored_secret(seen: Observed, found: Findings, resolved: Resolved, *, in_use: bool) -> Action:
    """Return the action that restores the Secret.

    The Secret is only read, not created again, in two cases: while sandboxes or runners use a key that the operator does
    not know, because a new key would invalidate their tokens; and if the chart's defaults have changed, because results
    would go elsewhere. If the Secret is then missing, the read fails, and the condition Reconciled says what to do.
    """
    if resolved.job is None or resolved.result_uri != found.result_uri or (in_use and not seen.has_key):
        return ReadKey(Ref("Secret", seen.ref.namespace, runner_name(seen.ref.name)), seen.uid)
    return EnsureKey(secret(resolved.job))


def _with_status(seen: Observed, found: Findings, actions: list[Action], ttl_left: float | None) -> Plan:
    """Return the plan with the new status and its Events. A status that differs only in counts is written later."""
    status = status_of(seen, found)
    before = own_part(seen.status)
    deadlines = [_next_check(seen, found), ttl_left]
    if status == before:
        return Plan(tuple(actions), requeue_seconds=_earliest(deadlines))
    if seen.counts_written and differs_in_counts_only(before, status):
        return Plan(tuple(actions), requeue_seconds=_earliest([*deadlines, COUNTS_SECONDS]))
    actions.append(Remember(counts_fact(seen.uid), "", COUNTS_SECONDS))
    actions += [Remember(disruption_fact(uid), "", DISRUPTION_SECONDS) for uid in seen.disrupted]
    return Plan(tuple(actions), status, events_of(seen, found, status), _earliest(deadlines))


def _next_check(seen: Observed, found: Findings) -> float | None:
    """Return when to plan again for changes that no watch reports."""
    is_leaving = seen.batch_job is not None and seen.batch_job.leaving
    if seen.alive and (found.verdict is not None or seen.suspend or seen.held or is_leaving):
        return GONE_AFTER.total_seconds()
    if found.verdict is None and seen.batch_job is not None and seen.batch_job.completed is not None:
        return REPORT_GRACE.total_seconds()
    waits = [pod.silent for pod in seen.pods if pod.silent is not None]
    if found.verdict is None and waits:
        return SILENT_SECONDS - max(waits) if max(waits) < SILENT_SECONDS else SECRET_SECONDS
    if found.verdict is None and _lacks_pods(seen):
        return SECRET_SECONDS
    return None


def _earliest(deadlines: list[float | None]) -> float | None:
    return min((seconds for seconds in deadlines if seconds is not None), default=None)
