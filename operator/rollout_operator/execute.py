"""Carry out a plan: actions in order, then one status write. What was written is expected to be seen before the next."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollout_operator.actions import (
    Action,
    Ask,
    Create,
    Delete,
    EnsureKey,
    Manifest,
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
from rollout_operator.cache import Cache, controller_of, uid_of
from rollout_operator.config import Budgets
from rollout_operator.expectations import Expectations
from rollout_operator.keys import CONFLICT, KeyRing, check_owner
from rollout_operator.kinds import WATCHED
from rollout_operator.memory import Memory
from rollout_operator.model_server.control_errands import Errands

UNKNOWN = 404
"""Of a create: the cluster has no such kind."""
MANAGER = "operator"
"""Field manager of the operator's part of a status."""
OF_OTHERS = ("runners",)
"""Fields of a status that others write."""


class NotLeader(Exception):
    """Another replica works now, or nobody is known to: nothing may be written."""


class Throttled(Exception):
    """This round's creates have to wait their turn."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"creates are limited; in {seconds:.1f} s")
        self.seconds = seconds


class Execution:
    """Carries out plans, within the budgets, while this replica leads."""

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        memory: Memory,
        keys: KeyRing,
        errands: Errands,
        limits: Budgets,
        may_write: Callable[[], bool],
    ) -> None:
        self._api, self._cache, self._memory, self._keys = api, cache, memory, keys
        self._errands, self._may_write = errands, may_write
        self._creates: Budget[Ref] = Budget(limits.creates_per_second, limits.writes_in_flight)
        self._deletes: Budget[Ref] = Budget(limits.deletes_per_second, limits.writes_in_flight)
        self.expectations: Expectations[Ref] = Expectations()

    async def carry_out(self, ref: Ref, obj: Manifest, plan: Plan) -> bool:
        """Do what the plan for one object says. Returns whether to plan again at once, having learned something.

        Raises:
            ApiError: an action failed; those before it are done.
            Throttled: nothing was created yet; come back later.
            NotLeader: this replica may not write.
        """
        # One token a round, not an object: half a round done and begun anew would cost more writes than it saves.
        creates = any(isinstance(action, Create | EnsureKey) for action in plan.actions)
        if creates and (wait := self._creates.admit(ref, time.monotonic())):
            raise Throttled(wait)
        learned = False
        for action in plan.actions:
            learned |= await self._act(ref, action)
            if learned and not isinstance(action, Remember):
                return True
        if plan.status is not None and differs(plan.status, obj.get("status", {})):
            await self._write_status(ref, obj, plan.status)
        return learned

    def forget(self, ref: Ref) -> None:
        """The object is gone."""
        self._creates.forget(ref)
        self.expectations.forget(ref)

    async def _act(self, key: Ref, action: Action) -> bool:
        match action:
            case Remember():
                self._memory.learn(action, time.time())
                return True
            case ReadKey(ref, owner_uid):
                await self._keys.read(ref.namespace, ref.name, owner_uid)
                return True
            case EnsureKey(body, field):
                self._check()
                async with self._creates.in_flight:
                    await self._keys.ensure(body, field)
                return True
            case Create():
                return await self._create(key, action)
            case Delete():
                await self._delete(key, action)
                return False
            case Patch(ref, spec):
                self._check()
                self._expect(key, ref, await self._api.merge(ref.kind, ref.namespace, ref.name, {"spec": spec}))
                return False
            case Replace(body):
                self._check()
                self._expect(key, action.ref, await self._api.replace(body))
                return False
            case SetPodCondition():
                await self._set_pod_condition(key, action)
                return False
            case Ask(errand, targets, how):
                self._check()
                self._errands.start(key, errand, targets, how)
                return False

    async def _set_pod_condition(self, key: Ref, action: SetPodCondition) -> None:
        self._check()
        try:
            written = await self._api.set_pod_condition(
                action.ref.namespace, action.ref.name, action.uid, action.condition
            )
        except ApiError as error:
            if error.status in (404, CONFLICT):  # Gone, or another of the same name: the watch is about to say so.
                return
            raise ApiError(error.status, f"condition of {action.ref}: {error.message}", error.retry_after) from error
        self._expect(key, action.ref, written)

    async def _write_status(self, ref: Ref, obj: Manifest, status: Manifest) -> None:
        self._check()
        try:
            written = await self._api.apply_status(obj, ref.kind, status, MANAGER)
        except ApiError as error:
            if error.status in (404, CONFLICT):  # Deleted, and maybe made anew: the watch is about to say so.
                return
            raise ApiError(error.status, f"status of {ref}: {error.message}", error.retry_after) from error
        self._expect(ref, ref, written)

    async def _create(self, key: Ref, action: Create) -> bool:
        self._check()
        ref = action.ref
        try:
            async with self._creates.in_flight:
                created = await self._api.create(action.body)
        except ApiError as error:
            if error.status == CONFLICT:
                await self._accept_existing(ref, action.body)
                return False
            if (error.refused or error.status == UNKNOWN) and action.if_refused:
                self._memory.learn(replace(action.if_refused, message=error.message), time.time())
                return True
            raise ApiError(error.status, f"creating {ref}: {error.message}", error.retry_after) from error
        self._expect(key, ref, created)
        return False

    async def _accept_existing(self, ref: Ref, body: Manifest) -> None:
        """An object of that name is ours if it has our controller; else it has to go first."""
        owner = controller_of(body)
        found = self._cache.get(ref.kind, ref.namespace, ref.name) if ref.kind in WATCHED else None
        found = found or await self._api.find(ref.kind, ref.namespace, ref.name)
        if owner and found:
            check_owner(found, ref.kind, owner["uid"])

    async def _delete(self, key: Ref, action: Delete) -> None:
        ref = action.ref
        now = time.monotonic()
        while wait := self._deletes.admit(ref, now):
            await asyncio.sleep(wait)
            now = time.monotonic()
        self._check()
        try:
            async with self._deletes.in_flight:
                deleted = await self._api.delete(ref.kind, ref.namespace, ref.name, action.uid, action.grace_seconds)
        except ApiError as error:
            if error.status in (404, CONFLICT):  # Gone, or another of the same name: this one is deleted.
                return
            raise ApiError(error.status, f"deleting {ref}: {error.message}", error.retry_after) from error
        # The watch may have shown its end before the reply came; then nothing more is to be seen.
        cached = self._cache.get(ref.kind, ref.namespace, ref.name)
        if cached is not None and action.uid == uid_of(cached) == deleted.get("metadata", {}).get("uid"):
            self._expect(key, ref, deleted)

    def _expect(self, key: Ref, ref: Ref, written: Manifest) -> None:
        if ref.kind not in WATCHED:
            return
        version = version_of(written)
        cached = self._cache.get(ref.kind, ref.namespace, ref.name)
        if cached is None or uid_of(cached) != uid_of(written) or version_of(cached) < version:
            self.expectations.expect(key, (ref.kind, ref.namespace, ref.name), version, time.monotonic())

    def _check(self) -> None:
        if not self._may_write():
            raise NotLeader


def version_of(obj: Manifest) -> int:
    """The resourceVersion, which Kubernetes defines to be a number that grows."""
    return int(obj["metadata"]["resourceVersion"])


def differs(wanted: Manifest, found: Manifest) -> bool:
    """Whether the operator's part of a status is not as it should be."""
    return _comparable(wanted) != _comparable({key: value for key, value in found.items() if key not in OF_OTHERS})


def _comparable(status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {condition["type"]: condition for condition in value} if key == "conditions" else value
        for key, value in status.items()
    }


def worth_telling(error: ApiError) -> bool:
    """Whether a person should read of it in an Event: not what passes by itself."""
    return error.status not in (UNREACHABLE, 429) and error.status < 500
