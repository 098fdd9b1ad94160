"""Plan one SandboxPool: how many sandboxes it has, and which are replaced. No side effects.

started ──► ready ──► draining: refuses further workspaces ──► empty ──► deleted
             │
             └ claimed by runners, which ask its executor alone and write nothing into the API server

Sandboxes are drained that are more than needed, too old, used too often, too full, or made from an earlier spec. Only an
executor knows whether it is empty, so a sandbox is deleted only when its executor refuses workspaces and has none.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Final

from rollout_api.cluster import MANAGED_BY, POOL_LABEL, POOL_SPEC_ANNOTATION, POOL_UID_LABEL, executor_token
from rollout_api.cluster import pool_secret_name as secret_name
from rollout_api.conditions import Condition
from rollout_api.measured_memory import set_request
from rollout_api.on_cluster.objects import Json, owned_object, owner_reference
from rollout_api.sandbox_pool import (
    PoolMemory,
    PoolPlaces,
    SandboxPoolSpec,
    SandboxPoolStatus,
    pooled_sandbox,
    recycle_bytes,
)
from rollout_operator.actions import (
    Action,
    AskExecutors,
    Create,
    Delete,
    EnsureKey,
    ExecutorRequest,
    Patch,
    Plan,
    Ref,
    Remember,
)
from rollout_operator.conditions import condition, find, parse_time, timestamp, with_timestamps
from rollout_operator.sandbox_pool.memory import plan_memory
from rollout_operator.sandbox_pool.observe import Member, Observed, counts_fact

ASK_SECONDS: Final = 5.0
"""Interval of the requests to each executor."""
COUNTS_SECONDS: Final = 10.0
"""Interval between writes that change only counts. Each workspace changes them."""
MOST_CREATES: Final = 20
"""Most sandboxes that one plan creates. The next plan creates the others."""
REPLACED_AT_ONCE: Final = 0.25
"""Part of the sandboxes, rounded up, that may be replaced at once, as in a Deployment."""
NAME_PART: Final = 43
"""Longest part of the pool's name in a Sandbox's name, which has at most 52 characters."""
READY: Final = "Ready"
_NEW_SANDBOXES: Final = "Delete the pool's Sandboxes; the operator then creates a new key, and Sandboxes with it"


def plan(seen: Observed) -> Plan:
    """Return the actions and the status."""
    if seen.is_deleted:
        return Plan()  # garbage collection deletes its objects
    if isinstance(seen.spec, list):
        return _with_status(seen, [], _invalid(seen, seen.spec))
    if seen.key is None:
        remedy = _NEW_SANDBOXES if seen.members else None
        return Plan((EnsureKey(_owned(seen, "Secret", secret_name(seen.ref.name), type="Opaque"), remedy=remedy),))
    spec, made_from = seen.spec, digest(seen.spec, seen.config.images.executor)
    desired, surplus_since = desired_replicas(spec, seen)
    current = [member for member in seen.members if not member.is_draining and _takes_a_slot(member)]
    drained = set(_to_drain(seen, spec, current, desired, made_from))
    memory, request, learned = plan_memory(seen, spec)
    actions: list[Action] = [*learned]
    actions += _create(seen, spec, made_from, request, desired - len(current) + len(drained))
    actions += [Patch(Ref("Sandbox", seen.ref.namespace, name), {"spec": {"drain": True}}) for name in sorted(drained)]
    if requests := tuple(_requests(seen, seen.key)):
        actions.append(AskExecutors(requests))
    actions += [Delete(Ref("Sandbox", seen.ref.namespace, one.name), one.uid) for one in seen.members if one.is_empty]
    kept = [member for member in current if member.name not in drained]
    return _with_status(seen, actions, _status(seen, spec, kept, desired, surplus_since, memory))


def digest(spec: SandboxPoolSpec, executor_image: str) -> str:
    """Return a digest of everything that a sandbox of the pool is made from."""
    parts = [spec.sandbox.wire(), executor_image]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def desired_replicas(spec: SandboxPoolSpec, seen: Observed) -> tuple[int, str | None]:
    """Return how many sandboxes the pool should have, and since when fewer are needed."""
    most = spec.most_replicas
    needed = min(most, max(spec.replicas, math.ceil(seen.wanted / spec.sandbox.per_sandbox)))
    before = min(most, seen.status.desired_replicas)
    if needed >= before:
        return needed, None
    since = seen.status.surplus_since
    if since is None:
        since = timestamp(seen.now)
    if parse_time(since) + timedelta(seconds=spec.idle_seconds) <= seen.now or before <= spec.replicas:
        return needed, None
    return before, since


def _takes_a_slot(member: Member) -> bool:
    """Whether it counts as one of the desired sandboxes. One that has ended without ever being ready counts until it is
    deleted, a minute later, so that a pool whose sandboxes cannot start does not create them in a loop.
    """
    return not member.has_ended or (not member.address and member.problem is not None)


def _to_drain(
    seen: Observed, spec: SandboxPoolSpec, current: Sequence[Member], desired: int, made_from: str
) -> Iterator[str]:
    """Yield the sandboxes to drain: what is too much, then a part of those to be replaced."""
    existing = [member for member in current if not member.has_ended]
    # First those of an earlier spec and those that do not serve yet, then those that will be empty soonest.
    order = sorted(
        existing, key=lambda one: (one.made_from == made_from, one.is_ready, one.live, one.created, one.name)
    )
    surplus = order[: max(0, len(existing) - desired)]
    yield from (member.name for member in surplus)
    draining = sum(member.is_draining and not member.has_ended for member in seen.members)
    may_replace = math.ceil(desired * REPLACED_AT_ONCE) - draining
    outdated = (one for one in order if one not in surplus and _is_outdated(seen, spec, one, made_from))
    for member, _ in zip(outdated, range(may_replace), strict=False):
        yield member.name


def _is_outdated(seen: Observed, spec: SandboxPoolSpec, member: Member, made_from: str) -> bool:
    if member.made_from != made_from:
        return True
    recycle, report = spec.recycle, member.report
    if seen.now - member.created >= timedelta(seconds=recycle.age_seconds):
        return True
    if report is None:
        return False
    return report.disk_bytes >= recycle_bytes(spec) or report.uses >= recycle.uses


def _requests(seen: Observed, key: str) -> Iterator[ExecutorRequest]:
    for member in seen.members:
        if not member.is_ready or not member.address:
            continue
        report = member.report
        left_over = frozenset() if report is None else report.left_over - seen.jobs
        is_due = report is None or seen.now - report.at >= timedelta(seconds=ASK_SECONDS)
        is_news = member.is_draining and report is not None and report.answered and not report.draining
        if is_due or is_news:
            token = executor_token(key, member.name, member.uid)
            yield ExecutorRequest(
                *(seen.ref.namespace, member.name, member.uid, member.address, token),
                drain=member.is_draining,
                jobs=seen.jobs,
                forget=left_over,
            )


def _create(
    seen: Observed, spec: SandboxPoolSpec, made_from: str, request: int | None, missing: int
) -> Iterator[Create]:
    for number in range(min(missing, MOST_CREATES)):
        drawn = hashlib.sha256(f"{seen.uid}/{seen.now.isoformat()}/{number}".encode()).hexdigest()[:8]
        name = f"{seen.ref.name[:NAME_PART].rstrip('-')}-{drawn}"
        body = _owned(seen, "Sandbox", name, spec=pooled_sandbox(spec.sandbox).wire())
        body["metadata"]["annotations"] = {POOL_SPEC_ANNOTATION: made_from}
        set_request(body, request)
        yield Create(body)


def _owned(seen: Observed, kind: str, name: str, **body: object) -> Json:
    owner = owner_reference("SandboxPool", seen.ref.name, seen.uid)
    labels = {**MANAGED_BY, POOL_LABEL: seen.ref.name, POOL_UID_LABEL: seen.uid}
    return owned_object(kind, name, seen.ref.namespace, owner, labels, **body)


def _status(
    seen: Observed,
    spec: SandboxPoolSpec,
    kept: Sequence[Member],
    desired: int,
    surplus_since: str | None,
    memory: PoolMemory | None,
) -> SandboxPoolStatus:
    ready = [member for member in kept if member.is_ready]
    lacking = spec.replicas - len(ready)
    if lacking <= 0:
        fresh = condition(READY, True, "Ready")
    else:
        reason, message = _problem(kept) or ("Starting", "")
        fresh = condition(
            READY, False, reason, f"{len(ready)} of {spec.replicas} sandboxes are ready{': ' * bool(message)}{message}"
        )
    return SandboxPoolStatus(
        observed_generation=seen.generation,
        conditions=_conditions(seen, fresh),
        replicas=sum(not member.has_ended for member in kept),
        ready_replicas=len(ready),
        desired_replicas=desired,
        draining=sum(member.is_draining and not member.has_ended for member in seen.members),
        places=PoolPlaces(
            total=len(ready) * spec.sandbox.per_sandbox,
            used=sum(member.live for member in seen.members if member.is_ready),
            wanted=seen.wanted,
        ),
        memory=memory,
        surplus_since=surplus_since,
        selector=f"{POOL_UID_LABEL}={seen.uid}",
    )


def _invalid(seen: Observed, problems: Iterable[str]) -> SandboxPoolStatus:
    fresh = condition(READY, False, "InvalidSpec", "; ".join(problems))
    change = {"observed_generation": seen.generation, "conditions": _conditions(seen, fresh)}
    return seen.status.model_copy(update=change)


def _problem(members: Iterable[Member]) -> tuple[str, str] | None:
    return next((one.problem for one in members if not one.is_ready and one.problem is not None), None)


def _conditions(seen: Observed, fresh: Condition) -> list[Condition]:
    return [with_timestamps(fresh, find(seen.status.conditions, READY), seen.now, seen.generation)]


def _with_status(seen: Observed, actions: list[Action], fresh: SandboxPoolStatus) -> Plan:
    """Return the plan with the new status. One that differs only in counts of places is written later."""
    wait = ASK_SECONDS if not isinstance(seen.spec, list) else None
    if fresh == seen.status:
        return Plan(tuple(actions), requeue_seconds=wait)
    if seen.counts_written and fresh.model_copy(update={"places": seen.status.places}) == seen.status:
        return Plan(tuple(actions), requeue_seconds=wait)
    actions.append(Remember(counts_fact(seen.uid), "", COUNTS_SECONDS))
    return Plan(tuple(actions), status=fresh.wire(), requeue_seconds=wait)
