"""State of one SandboxPool, read from the operator's cache and memory. No I/O."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial

from rollout_api.cluster import POOL_SPEC_ANNOTATION, job_tag
from rollout_api.conditions import true_conditions
from rollout_api.on_cluster.objects import EXCESS, Manifest
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.rollout_job import RunnerState
from rollout_api.sandbox import START_CONDITIONS
from rollout_api.sandbox_pool import SandboxPoolSpec, SandboxPoolStatus
from rollout_operator.actions import Fact, Ref
from rollout_operator.cache import read_as, reports_of, uid_of
from rollout_operator.conditions import parse_time
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.sandbox_pool.validate import checked
from rollout_operator.world import World

_ENDED = ("Succeeded", "Failed", "Suspended")
"""Conditions of a RolloutJob that wants no sandboxes, once its runners have ended."""


def counts_fact(uid: str) -> Fact:
    """Return the fact that a pool's counts were written recently."""
    return ("pool-counts-written", uid)


def request_fact(uid: str) -> Fact:
    """Return the fact that a pool's memory request was changed recently."""
    return ("pool-request-changed", uid)


def use_fact(uid: str) -> Fact:
    """Return the fact that the pool's status has the measured use of a Sandbox that has ended."""
    return ("pool-use-counted", uid)


@dataclass(frozen=True)
class Member:
    """One Sandbox of the pool."""

    name: str
    uid: str
    made_from: str
    """Digest of what it was made from."""
    created: datetime
    is_ready: bool
    is_draining: bool
    has_ended: bool
    """Whether it has ended or is being deleted."""
    address: str
    """Address of its pod; empty until it was ready once."""
    problem: tuple[str, str] | None
    """Why it is not ready or has ended, as reason and message, if known."""
    report: ExecutorReport | None
    is_counted: bool = False
    """Whether the pool's status has its measured use."""

    @property
    def live(self) -> int:
        return self.report.live if self.report else 0

    @property
    def is_empty(self) -> bool:
        """Whether it is a draining sandbox that can be deleted."""
        if not self.is_draining or self.has_ended:
            return False
        report = self.report
        # One that was never ready has no workspaces. Later its executor alone knows.
        if not self.address:
            return True
        return report is not None and report.answered and report.draining and not report.live and not report.rollouts


@dataclass(frozen=True)
class Observed:
    """All inputs of `plan`."""

    ref: Ref
    uid: str
    generation: int | None
    is_deleted: bool
    spec: SandboxPoolSpec | list[str]
    """The spec, or its problems."""
    status: SandboxPoolStatus
    members: tuple[Member, ...]
    """By name."""
    key: str | None
    wanted: int
    """Places that runners want."""
    jobs: frozenset[str]
    """Jobs of the namespace that may have workspaces, as `job_tag`."""
    counts_written: bool
    keeps_request: bool
    """Whether the memory request was changed recently."""
    config: OperatorConfig
    now: datetime


def observe(world: World, pool: Manifest) -> Observed:
    """Return the state of an existing SandboxPool."""
    metadata, cache = pool["metadata"], world.cache
    name, namespace, uid = metadata["name"], metadata["namespace"], uid_of(pool)
    jobs = [
        uid_of(job)
        for job in cache.all("RolloutJob")
        if job["metadata"]["namespace"] == namespace and not _is_over(world, job)
    ]
    reports = [report for job in jobs for report in reports_of(cache, namespace, job)]
    return Observed(
        ref=Ref("SandboxPool", namespace, name),
        uid=uid,
        generation=metadata.get("generation"),
        is_deleted="deletionTimestamp" in metadata,
        spec=_spec(pool, world.config),
        status=read_as(SandboxPoolStatus, pool.get("status")) or SandboxPoolStatus(),
        members=tuple(
            sorted(map(partial(_member, world), cache.owned("Sandbox", namespace, uid)), key=lambda one: one.name)
        ),
        key=world.keys.get(uid),
        wanted=sum(report.pools.get(name, 0) for report in reports if report.state is RunnerState.RUNNING),
        jobs=frozenset(map(job_tag, jobs)),
        counts_written=world.recall(counts_fact(uid)) is not None,
        keeps_request=world.recall(request_fact(uid)) is not None,
        config=world.config,
        now=world.now,
    )


def _spec(pool: Manifest, config: OperatorConfig) -> SandboxPoolSpec | list[str]:
    if why := pool.get(EXCESS):
        return [f"spec: {why}"]
    return checked(pool.get("spec") or {}, pool["metadata"], config)


def _member(world: World, sandbox: Manifest) -> Member:
    metadata, status = sandbox["metadata"], sandbox.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    true = true_conditions(status)
    problem = next(
        (
            (condition["reason"], condition.get("message", ""))
            for condition in (conditions.get(kind, {}) for kind in ("Finished", *START_CONDITIONS))
            if condition and (condition["status"] == "False") is (condition["type"] != "Finished")
        ),
        None,
    )
    return Member(
        name=metadata["name"],
        uid=metadata["uid"],
        made_from=(metadata.get("annotations") or {}).get(POOL_SPEC_ANNOTATION, ""),
        created=parse_time(metadata["creationTimestamp"]),
        is_ready="Ready" in true and "Finished" not in true,
        is_draining=bool((sandbox.get("spec") or {}).get("drain")),
        has_ended="Finished" in true or "deletionTimestamp" in metadata,
        address=status.get("podIP") or "",
        problem=problem,
        report=world.executors.get(metadata["uid"]),
        is_counted=world.recall(use_fact(metadata["uid"])) is not None,
    )


def _is_over(world: World, job: Manifest) -> bool:
    """Whether no runner of a job is left that may use its workspaces."""
    if not any(kind in true_conditions(job.get("status") or {}) for kind in _ENDED):
        return False
    namespace = job["metadata"]["namespace"]
    pods = (
        pod
        for batch_job in world.cache.owned("Job", namespace, uid_of(job))
        for pod in world.cache.owned("Pod", namespace, uid_of(batch_job))
    )
    return all((pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") for pod in pods)
