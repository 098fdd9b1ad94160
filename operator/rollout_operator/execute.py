"""Execute a plan: its actions, then one status write that also reports failed actions. The next plan waits until the
watches show the writes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rollout_api.conditions import Condition
from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.operator_config import Budgets
from rollout_operator import clock
from rollout_operator.actions import (
    Action,
    Ask,
    AskExecutors,
    Create,
    Delete,
    EnsureKey,
    Patch,
    Plan,
    ReadKey,
    Ref,
    Remember,
    Replace,
    SetPodCondition,
)
from rollout_operator.api import UNREACHABLE, ApiError, KubeApi
from rollout_operator.budgets import Budget
from rollout_operator.cache import PRIMARY, Cache, Expectations, controller_of, uid_of
from rollout_operator.conditions import condition, with_timestamps
from rollout_operator.executor_contact import ExecutorContact
from rollout_operator.keys import CONFLICT, KeyRing, check_owner
from rollout_operator.model_server.operations import ServerOperations
from rollout_operator.prune import readable_spec
from rollout_operator.world import WATCHED, Memory

MANAGER = "operator"
"""Field manager of the operator's part of a status."""
RECONCILED = "Reconciled"
"""Type of the condition that is False while an action fails. Plans neither read nor write it. If a plan writes no Ready, as
before an object has its key, Ready is a copy of it, because people and `kubectl wait` look there.
"""
READY = "Ready"
OPERATOR_ERROR = -1
"""Status code for an exception in the operator itself."""
_KEEPS_USER_NAMESPACES = ("keeps-user-namespaces",)
"""Fact: the API server keeps `hostUsers: false` in pods."""
_KEEPS_SECONDS = 3600.0
"""Time for which the fact is remembered."""
_CREATING = Create | EnsureKey | ReadKey
"""Actions that later creates may depend on."""


class NotLeader(Exception):
    """This replica may not write: another replica leads, or the leader is unknown."""


class Throttled(Exception):
    """The creates of this plan must wait because of the rate limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"creates are rate-limited; they are retried in {seconds:.1f} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Done:
    """Result of an executed plan."""

    again: bool = False
    """Plan again at once, because a fact was learned."""
    failures: tuple[ApiError, ...] = ()
    """Errors of failed actions. Later creates were skipped; other later actions ran."""
    wait: float | None = None
    """Seconds until deletes that the rate limit delayed can run; None if none was delayed."""


class Execution:
    """Executes plans, within the rate limits, while this replica leads."""

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        memory: Memory,
        keys: KeyRing,
        operations: ServerOperations,
        executors: ExecutorContact,
        limits: Budgets,
        may_write: Callable[[], bool],
    ) -> None:
        self._api, self.cache, self.memory, self.keys = api, cache, memory, keys
        self.operations, self.executors, self.may_write = operations, executors, may_write
        self._creates = Budget[Ref](limits.creates_per_second, limits.writes_in_flight, _namespace)
        self._deletes = Budget[Ref](limits.deletes_per_second, limits.writes_in_flight, _namespace)
        self._most_deletes = limits.writes_in_flight
        self.expectations: Expectations[Ref] = Expectations()
        self.on_progress: Callable[[Ref], None] = lambda ref: None
        """Called with the planned object after each successful action."""

    async def carry_out(self, ref: Ref, obj: Manifest, plan: Plan, now: datetime) -> Done:
        """Execute the plan for one object. Raises Throttled before the first action, and NotLeader."""
        # One token for all creates of a plan: repeating half a plan would cost more writes than separate tokens save.
        creates = any(isinstance(action, Create | EnsureKey) for action in plan.actions)
        if creates and (wait := self._creates.admit(ref, time.monotonic())):
            raise Throttled(wait)
        # The keys that were known when the plan was made: plans of other objects may read the same key meanwhile.
        keys = {uid: self.keys.known.get(uid) for uid in map(_owner_of_key, plan.actions) if uid is not None}
        learned, failures = False, list[ApiError]()
        may_create = True
        for action in plan.actions:
            if isinstance(action, Delete) or (isinstance(action, _CREATING | Remember) and not may_create):
                continue
            try:
                learned |= await self._act(ref, action)
                uid = _owner_of_key(action)
                learned |= uid is not None and self.keys.known.get(uid) != keys[uid]
            except ApiError as error:
                failures.append(error)
                may_create &= not isinstance(action, _CREATING | Replace)
            else:
                self.on_progress(ref)
                if learned and not failures and not isinstance(action, Remember):
                    return Done(again=True)
        pause = await self._delete_some(ref, [a for a in plan.actions if isinstance(a, Delete)], failures)
        try:
            await self._report(ref, obj, plan.status, failures, now)
        except ApiError as error:
            failures.append(error)
        return Done(learned, tuple(failures), pause)

    async def read_spec(self, ref: Ref, uid: str) -> Manifest | None:
        """Return the object's whole spec from the API server; None if no object with that uid exists."""
        found = await self._api.find(ref.kind, ref.namespace, ref.name)
        return readable_spec(found.get("spec")) if found is not None and uid_of(found) == uid else None

    async def report_failure(self, ref: Ref, obj: Manifest, failure: ApiError, now: datetime) -> None:
        """Write into the object's status why planning failed. Raises ApiError and NotLeader."""
        await self._report(ref, obj, None, [failure], now)

    def forget(self, ref: Ref) -> None:
        self._creates.forget(ref)
        self._deletes.forget(ref)
        self.expectations.forget(ref)

    async def _act(self, key: Ref, action: Action) -> bool:
        match action:
            case Remember():
                self.memory.learn(action, clock.now().timestamp())
                return True
            case ReadKey(ref, owner_uid):
                await self.keys.read(ref.namespace, ref.name, owner_uid)
            case EnsureKey(body, field, remedy):
                async with self._creates.in_flight:
                    self._check()
                    await self.keys.ensure(body, field, remedy)
            case Create():
                return await self._create(key, action)
            case Delete():
                await self._delete(key, action)
            case Patch(ref, change):
                self._check()
                self._expect(key, ref, await self._api.merge(ref.kind, ref.namespace, ref.name, change))
            case Replace(body):
                self._check()
                self._expect(key, action.ref, await self._api.replace(body))
            case SetPodCondition(ref, uid, found):
                self._check()
                write = self._api.set_pod_condition(ref.namespace, ref.name, uid, found)
                if (written := await self._written(f"condition of {ref}", write)) is not None:
                    self._expect(key, ref, written)
            case Ask():
                self._check()
                self.operations.start(key, action)
            case AskExecutors():
                self._check()
                self.executors.start(key, action)
        return False

    async def _written(self, what: str, write: Awaitable[Manifest]) -> Manifest | None:
        """Return the response to a write; None if the object was deleted or replaced. The watch then reports that."""
        try:
            return await write
        except ApiError as error:
            if error.status == 404 or error.of_another_uid:
                return None
            raise ApiError(error.status, f"{what}: {error.message}", error.retry_after) from error

    async def _report(
        self, ref: Ref, obj: Manifest, status: Manifest | None, failures: Sequence[ApiError], now: datetime
    ) -> None:
        """Write the planned status, or the existing one, with the failures added."""
        if ref.kind not in PRIMARY:
            return
        found = obj.get("status") or {}
        wanted = with_failures(
            found if status is None else status, found, failures, obj["metadata"].get("generation"), now
        )
        if not differs(wanted, found):
            return
        self._check()
        write = self._api.apply_status(obj, ref.kind, wanted, MANAGER)
        if (written := await self._written(f"status of {ref}", write)) is not None:
            self._expect(ref, ref, written)

    async def _create(self, key: Ref, action: Create) -> bool:
        ref = action.ref
        try:
            async with self._creates.in_flight:
                await self._check_user_namespace(action.body)
                self._check()  # Last, because another replica may have taken the lease during the waits above.
                created = await self._api.create(action.body)
        except ApiError as error:
            # A full quota also refuses the creation of existing objects.
            if error.status in (403, CONFLICT) and await self._exists(ref, action.body):
                return False
            if (error.refused or error.lacks_kind) and action.if_refused:
                self.memory.learn(replace(action.if_refused, message=error.message), clock.now().timestamp())
                return True
            raise ApiError(error.status, f"creating {ref}: {error.message}", error.retry_after) from error
        self._expect(key, ref, created)
        return False

    async def _check_user_namespace(self, body: Manifest) -> None:
        """Raise ApiError unless a pod gets the user namespace that it requests.

        If the feature is off, the API server silently drops the field, and an Overlay pod would be root on its node.
        """
        if body["kind"] != "Pod" or body["spec"].get("hostUsers") is not False:
            return
        if self.memory.recall(_KEEPS_USER_NAMESPACES, clock.now().timestamp()) is None:
            if (await self._api.create(body, dry_run=True))["spec"].get("hostUsers") is not False:
                raise ApiError(
                    422, "the API server drops hostUsers: false; enable its feature gate UserNamespacesSupport"
                )
            self.memory.learn(Remember(_KEEPS_USER_NAMESPACES, "", _KEEPS_SECONDS), clock.now().timestamp())

    async def _exists(self, ref: Ref, body: Manifest) -> bool:
        """Whether an object with that name exists. Raises ApiError if it has another controller.

        If none exists, the conflict was in a ResourceQuota, whose count admission could not update.
        """
        owner = controller_of(body)
        found = self.cache.get(ref.kind, ref.namespace, ref.name) if ref.kind in WATCHED else None
        found = found or await self._api.find(ref.kind, ref.namespace, ref.name)
        if owner and found:
            check_owner(found, ref.kind, owner["uid"])
        return found is not None

    async def _delete_some(self, key: Ref, deletes: Sequence[Delete], failures: list[ApiError]) -> float | None:
        """Delete as many objects concurrently as the rate limit allows. Returns the seconds until it can continue; None
        if all were deleted.

        A suspended job may have thousands of Sandboxes. They must not block a worker, nor use up the rate limit.
        """
        if not deletes:
            return None
        if wait := self._deletes.admit(key, time.monotonic()):
            return wait
        batch = [deletes[0]]
        while len(batch) < min(self._most_deletes, len(deletes)) and self._deletes.try_extra(time.monotonic()):
            batch.append(deletes[len(batch)])
        done = await asyncio.gather(*(self._delete(key, action) for action in batch), return_exceptions=True)
        for error in done:
            if isinstance(error, ApiError):
                failures.append(error)
            elif error is not None:
                raise error
        return 0.0 if len(batch) < len(deletes) else None

    async def _delete(self, key: Ref, action: Delete) -> None:
        ref = action.ref
        async with self._deletes.in_flight:
            self._check()
            write = self._api.delete(
                ref.kind, ref.namespace, ref.name, action.uid, action.grace_seconds, foreground=action.foreground
            )
            deleted = await self._written(f"deleting {ref}", write)
        if deleted is None:
            return
        self.on_progress(key)
        # The watch may have reported the deletion before the response came; then no further event follows.
        cached = self.cache.get(ref.kind, ref.namespace, ref.name)
        if cached is not None and action.uid == uid_of(cached) == deleted.get("metadata", {}).get("uid"):
            self._expect(key, ref, deleted)

    def _expect(self, key: Ref, ref: Ref, written: Manifest) -> None:
        if ref.kind not in WATCHED:
            return
        version = version_of(written)
        cached = self.cache.get(ref.kind, ref.namespace, ref.name)
        if cached is None or uid_of(cached) != uid_of(written) or version_of(cached) < version:
            self.expectations.expect(key, (ref.kind, ref.namespace, ref.name), version, time.monotonic())

    def _check(self) -> None:
        if not self.may_write():
            raise NotLeader


def _owner_of_key(action: Action) -> str | None:
    """Return the uid of the owner of the key that an action reads; None for other actions."""
    match action:
        case ReadKey(owner_uid=uid):
            return uid
        case EnsureKey(body) if (owner := controller_of(body)) is not None:
            return str(owner["uid"])
    return None


def _namespace(ref: Ref) -> str:
    """Return the namespace whose share of the rate limit a write uses."""
    return ref.namespace


def version_of(obj: Manifest) -> int:
    """Return the resourceVersion, which Kubernetes defines as a growing number."""
    return int(obj["metadata"]["resourceVersion"])


def without_failures(obj: Manifest) -> Manifest:
    """Return the object as plans see it: without the condition Reconciled, and without a Ready copied from it."""
    status = obj.get("status") or {}
    found = status.get("conditions", ())
    conditions = _of_plans(found)
    return obj if len(conditions) == len(found) else {**obj, "status": {**status, "conditions": conditions}}


def with_failures(
    status: Manifest, found: Manifest, failures: Sequence[ApiError], generation: int | None, now: datetime
) -> Manifest:
    """Return the status with the condition Reconciled for failures that a person can fix; without it if nothing failed.

    An outage leaves the condition unchanged, because its cause is not the object.
    """
    others = _of_plans(status.get("conditions", ()))
    planned = _of_plans(found.get("conditions", ()))
    before = {entry["type"]: entry for entry in found.get("conditions", ()) if entry not in planned}
    kinds = (RECONCILED,) if any(entry["type"] == READY for entry in others) else (RECONCILED, READY)
    reported = [failure for failure in failures if is_reportable(failure)]
    if not reported:
        kept = [before[kind] for kind in kinds if kind in before] if failures else []
        return {**status, "conditions": [*others, *kept]} if kept or "conditions" in status else status
    message = "; ".join(dict.fromkeys(failure.message for failure in reported))
    reason = _REASONS.get(reported[0].status, "ActionFailed")
    for kind in kinds:
        failed, old = condition(kind, False, reason, message), before.get(kind)
        if old and (old["reason"], old.get("message")) == (reason, failed.message):
            others.append(old)
        else:
            since = Condition.model_validate(old) if old else None
            others.append(with_timestamps(failed, since, now, generation).wire())
    return {**status, "conditions": others}


def _of_plans(conditions: Sequence[Manifest]) -> list[Manifest]:
    """Return the conditions without those that `with_failures` added."""
    failed = next((entry for entry in conditions if entry["type"] == RECONCILED), None)
    if failed is None:
        return list(conditions)
    told = (failed["status"], failed["reason"], failed.get("message"))
    return [
        entry
        for entry in conditions
        if entry["type"] not in (RECONCILED, READY)
        or (entry["type"] == READY and (entry["status"], entry["reason"], entry.get("message")) != told)
    ]


_REASONS: Mapping[int, str] = {
    OPERATOR_ERROR: "OperatorError",
    400: "Refused",
    403: "Forbidden",
    404: "NotFound",
    CONFLICT: "Conflict",
    422: "Refused",
}


def differs(wanted: Manifest, found: Manifest) -> bool:
    """Whether two statuses differ. The order of conditions does not matter."""
    return _comparable(wanted) != _comparable(found)


def _comparable(status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {condition["type"]: condition for condition in value} if key == "conditions" else value
        for key, value in status.items()
    }


def is_reportable(error: ApiError) -> bool:
    """Whether a failure is reported in an Event and a condition. Transient failures are not."""
    return error.status not in (UNREACHABLE, 429) and error.status < 500 and not error.is_overtaken
