"""The state that the plan of a RolloutJob needs, read from the operator's cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rollout_api.cluster import SUSPEND_ANNOTATION, runner_name
from rollout_api.conditions import true_conditions
from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.rollout_job import Restarts, RunnerReport, RunnerState
from rollout_operator.actions import Ref
from rollout_operator.cache import Cache, controller_of, model_server_of, report_of, reports_of, uid_of
from rollout_operator.conditions import disruption, end_of_job, parse_time, start_problem
from rollout_operator.world import World

GONE_AFTER: Final = timedelta(seconds=60)
"""Time after a pod's deadline for its end. A pod that still exists is then assumed to be on a dead node."""

_ENDED: Final = ("Succeeded", "Failed")
KUEUE_MIN_PARALLELISM: Final = "kueue.x-k8s.io/job-min-parallelism"
"""Annotation of a Job whose parallelism Kueue may lower to this number when it admits the Job."""


@dataclass(frozen=True)
class RunnerPod:
    """One runner pod, as far as the job needs it."""

    index: str
    """Index of the runner; text, because it is only displayed."""
    alive: bool
    """Whether the pod runs or may still run."""
    ready: bool
    trouble: tuple[str, str] | None = None
    """Why the pod does not start, as reason and message."""
    silent: float | None = None
    """Seconds on a node without a start or a reason. A volume, such as the Secret, may be missing."""
    failure: str | None = None
    """Why the pod failed."""
    ended: str = ""
    """When the pod failed, in RFC 3339."""


@dataclass(frozen=True)
class BatchJob:
    """The Indexed Job of the runners."""

    uid: str
    created: datetime
    completions: int
    """The number of runners in its spec."""
    parallelism: int
    """Most runners at once in its spec."""
    may_admit_fewer: bool
    """Whether Kueue may start the Job with a lower parallelism."""
    suspend: bool
    """The `suspend` field of its spec."""
    suspend_set: bool
    """The value of `suspend` that the operator last set."""
    suspended: bool
    """Whether its status reports it as suspended, with no active pods."""
    leaving: bool
    """Whether the Job was deleted and waits for its pods to end."""
    failed_pods: int
    completed: datetime | None
    """When its last index succeeded; None while it runs."""
    given_up: tuple[str, str] | None
    """Why Kubernetes marked it as failed, as reason and message. Only another manager's change can cause that."""


@dataclass(frozen=True)
class Observed:
    """A RolloutJob and all its objects."""

    manifest: Manifest
    config: OperatorConfig
    now: datetime
    has_key: bool
    batch_job: BatchJob | None
    pods: tuple[RunnerPod, ...]
    sandboxes: tuple[tuple[Ref, str], ...]
    """References and uids of its Sandboxes."""
    has_policy: bool
    """Whether the NetworkPolicy of its runners exists."""
    shards: frozenset[str]
    reports: tuple[RunnerReport, ...]
    """Reports of its runners, by index."""
    reports_deleted: bool
    """Whether a RolloutShard was deleted after the Job was created. It may have been created again, without a report."""
    pools: tuple[str, ...]
    """Names of the SandboxPools of its namespace."""
    counts_written: bool
    """Whether its counts were written within COUNTS_SECONDS."""
    secret_checked: bool = False
    """Whether the existence of its Secret was checked recently."""
    disrupted: tuple[str, ...] = ()
    """Uids of runner pods that Kubernetes ended, and that were not counted yet."""
    server_ref: Ref | None = None
    model_server: Manifest | None = None
    """The ModelServer that it uses, if it exists."""

    @property
    def ref(self) -> Ref:
        return Ref.of("RolloutJob", self.manifest)

    @property
    def uid(self) -> str:
        return uid_of(self.manifest)

    @property
    def spec(self) -> Mapping[str, Any]:
        """Return its spec, of which the cache may have only a part."""
        found: Mapping[str, Any] = self.manifest["spec"]
        return found

    @property
    def status(self) -> Mapping[str, Any]:
        return self.manifest.get("status") or {}

    @property
    def suspend(self) -> bool:
        """The value of the RolloutJob's own `spec.suspend`."""
        return bool(self.spec.get("suspend"))

    @property
    def held(self) -> bool:
        """Whether another manager, such as Kueue, suspends the runners' Job."""
        job = self.batch_job
        return job is not None and job.suspend and not job.suspend_set and not self.suspend

    @property
    def replicas(self) -> int:
        return replicas_of(self.manifest)

    @property
    def listed_rollouts(self) -> int | None:
        """Return the number of rollouts if the manifest lists all tasks."""
        tasks = self.spec.get("tasks", {}).get("inline")
        return len(tasks) * int(self.spec.get("groupSize", 1)) if tasks else None

    @property
    def owns_server(self) -> bool:
        return bool((self.spec.get("model") or {}).get("server"))

    @property
    def runners_at_work(self) -> int:
        """Return the number of runners whose shard is neither completed nor aborted."""
        return self.replicas - sum(
            report.state in (RunnerState.COMPLETED, RunnerState.ABORTED) for report in self.reports
        )

    @property
    def alive(self) -> int:
        return sum(pod.alive for pod in self.pods)

    @property
    def restarts(self) -> Restarts | None:
        restarts = self.status.get("restarts")
        return None if restarts is None else Restarts.model_validate(restarts)

    def condition(self, kind: str) -> Mapping[str, Any]:
        """Return a condition as last written; empty if it was not written yet."""
        return next((found for found in self.status.get("conditions", ()) if found["type"] == kind), {})


def replicas_of(job: Manifest) -> int:
    return int(job["spec"].get("runners", {}).get("replicas", 1))


def counts_fact(uid: str) -> tuple[str, str]:
    """Return the fact that a job's counts were written recently."""
    return ("counts-written", uid)


def secret_fact(uid: str) -> tuple[str, str]:
    """Return the fact that a job's Secret exists."""
    return ("secret-exists", uid)


def disruption_fact(pod_uid: str) -> tuple[str, str]:
    """Return the fact that a disrupted runner pod was counted."""
    return ("disruption-counted", pod_uid)


def observe(world: World, obj: Manifest) -> Observed:
    namespace, uid = obj["metadata"]["namespace"], uid_of(obj)
    found = next(iter(world.cache.owned("Job", namespace, uid)), None)
    batch_job = None if found is None else _batch_job(found)
    shards = tuple(world.cache.owned("RolloutShard", namespace, uid))
    pods = world.cache.owned("Pod", namespace, batch_job.uid) if batch_job else ()
    return Observed(
        manifest=obj,
        config=world.config,
        now=world.now,
        has_key=uid in world.keys,
        batch_job=batch_job,
        pods=tuple(_runner_pod(pod, world.now) for pod in pods),
        sandboxes=tuple(
            (Ref.of("Sandbox", sandbox), uid_of(sandbox))
            for sandbox in world.cache.owned("Sandbox", namespace, uid)
            if "deletionTimestamp" not in sandbox["metadata"]
        ),
        has_policy=any(
            policy["metadata"]["name"] == runner_name(obj["metadata"]["name"])
            for policy in world.cache.owned("NetworkPolicy", namespace, uid)
        ),
        shards=frozenset(shard["metadata"]["name"] for shard in shards),
        reports=_reports(world.cache, obj),
        reports_deleted=batch_job is not None and _reports_deleted(shards, replicas_of(obj), batch_job.created),
        pools=tuple(
            pool["metadata"]["name"]
            for pool in world.cache.all("SandboxPool")
            if pool["metadata"]["namespace"] == namespace
        ),
        counts_written=world.recall(counts_fact(uid)) is not None,
        secret_checked=world.recall(secret_fact(uid)) is not None,
        disrupted=tuple(
            uid_of(pod) for pod in pods if _is_disrupted(pod) and world.recall(disruption_fact(uid_of(pod))) is None
        ),
        server_ref=model_server_of(obj),
        model_server=_model_server(world, obj),
    )


def _reports(cache: Cache, job: Manifest) -> tuple[RunnerReport, ...]:
    """Return one report for each index, by index. Reports with an index beyond the job's replicas are ignored."""
    found = {
        report.index: report
        for report in reports_of(cache, job["metadata"]["namespace"], uid_of(job))
        if report.index < replicas_of(job)
    }
    return tuple(found[index] for index in sorted(found))


def _reports_deleted(shards: Sequence[Manifest], replicas: int, job_created: datetime) -> bool:
    """Whether RolloutShards were deleted. The originals are older than the Job; replacements are newer."""
    silent = (shard["metadata"]["creationTimestamp"] for shard in shards if report_of(shard) is None)
    return len(shards) < replicas or any(parse_time(created) > job_created for created in silent)


def _model_server(world: World, job: Manifest) -> Manifest | None:
    ref = model_server_of(job)
    found = world.cache.get(ref.kind, ref.namespace, ref.name) if ref else None
    is_own = bool((job["spec"].get("model") or {}).get("server"))
    if found is not None and is_own and (controller_of(found) or {}).get("uid") != uid_of(job):
        return None  # it belongs to an earlier job with the same name
    return found


def _batch_job(job: Manifest) -> BatchJob:
    status, annotations = job.get("status") or {}, job["metadata"].get("annotations") or {}
    completed, given_up = end_of_job(job)
    return BatchJob(
        uid=uid_of(job),
        created=parse_time(job["metadata"]["creationTimestamp"]),
        completions=int(job["spec"].get("completions") or 0),
        parallelism=int(job["spec"].get("parallelism") or 0),
        may_admit_fewer=KUEUE_MIN_PARALLELISM in annotations,
        suspend=bool(job["spec"].get("suspend")),
        suspend_set=annotations.get(SUSPEND_ANNOTATION) == "true",
        suspended="Suspended" in true_conditions(status) and not status.get("active"),
        leaving="deletionTimestamp" in job["metadata"],
        failed_pods=int(status.get("failed", 0)),
        completed=None if completed is None else parse_time(completed["lastTransitionTime"]),
        given_up=None if given_up is None else (given_up.get("reason", "Failed"), given_up.get("message", "")),
    )


def _runner_pod(pod: Manifest, now: datetime) -> RunnerPod:
    metadata, status = pod["metadata"], pod.get("status") or {}
    phase = status.get("phase", "Pending")
    leaving = metadata.get("deletionTimestamp")
    gone = leaving is not None and parse_time(leaving) + GONE_AFTER < now
    waits = start_problem(status) if phase == "Pending" and leaving is None else None
    started = status.get("startTime") if phase == "Pending" and leaving is None and waits is None else None
    failure, ended = _failure(status) if phase == "Failed" else (None, "")
    return RunnerPod(
        index=metadata.get("labels", {}).get("batch.kubernetes.io/job-completion-index", "?"),
        alive=phase not in _ENDED and not gone,
        ready=leaving is None and "Ready" in true_conditions(status),
        trouble=waits,
        silent=(now - parse_time(started)).total_seconds() if started else None,
        failure=failure,
        ended=ended,
    )


def _is_disrupted(pod: Manifest) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    is_over = phase == "Failed" or "deletionTimestamp" in pod["metadata"]
    return phase != "Succeeded" and disruption(pod, is_over=is_over) is not None


def _failure(status: Mapping[str, Any]) -> tuple[str, str]:
    """Return why and when a pod failed."""
    if reason := status.get("reason"):  # Evicted, Shutdown, NodeLost: reported for the pod, not for a container
        return ": ".join(filter(None, (reason, status.get("message", "")))), ""
    for container in status.get("containerStatuses") or ():
        if ended := container.get("state", {}).get("terminated"):
            code = f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}"
            return ": ".join(filter(None, (code, ended.get("message", "").strip()))), ended.get("finishedAt") or ""
    return "its pod failed without a reported reason", ""
