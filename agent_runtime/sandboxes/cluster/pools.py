"""The SandboxPools whose sandboxes this runner may use, and their Sandboxes. Only the operator creates and deletes these."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent_runtime.kube.api import ApiError, KubeApi
from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.cluster.sandbox_object import Reason, SandboxView, found_kind, kind_of
from agent_runtime.sandboxes.cluster.watch import Changed, SandboxWatch
from agent_runtime.shared_tasks import repeat
from rollout_api.cluster import KEY_FILE, POOL_UID_LABEL, POOLS_FOLDER
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import SandboxSpec
from rollout_api.sandbox_pool import SandboxPool, pooled_sandbox, why_unfit

# A pool's spec changes rarely. Until it is read again, sandboxes of the new spec are not used.
READ_SECONDS = 30.0

log = logging.getLogger(__name__)


@dataclass
class Pool:
    """One SandboxPool, and its Sandboxes."""

    name: str
    uid: str
    key_file: Path
    described: SandboxPool
    watch: SandboxWatch
    is_gone: bool = False
    """Whether the pool was deleted. The ends of its Sandboxes are still watched."""

    @property
    def key(self) -> str:
        """Return the pool's key; empty while its Secret is missing. The file of a pool that replaced another one of the
        same name has the new key a minute later.
        """
        try:
            return self.key_file.read_text().strip()
        except OSError:
            return ""

    @property
    def has_sandboxes(self) -> bool:
        """Whether the pool has sandboxes, or may get some."""
        spec, status = self.described.spec, self.described.status
        is_invalid = status is not None and any(one.reason == "InvalidSpec" for one in status.conditions)
        may_grow = not is_invalid and spec.most_replicas > 0
        return may_grow or any(True for _ in self.usable)

    @property
    def spec(self) -> SandboxSpec:
        return pooled_sandbox(self.described.spec.sandbox)

    @property
    def usable(self) -> Iterable[SandboxView]:
        """The ready Sandboxes that take workspaces and have the pool's present spec."""
        wanted = kind_of(self.spec)
        return (
            view
            for view in self.watch.views.values()
            if not self.is_gone and view.can_be_reached and not view.is_draining and found_kind(view.spec) == wanted
        )

    @property
    def full(self) -> str:
        """What to say of a request that waits for a place."""
        spec, ready = self.described.spec, sum(1 for _ in self.usable)
        words = (
            f"SandboxPool {self.name} has no free place: {ready} of at most {spec.most_replicas} sandboxes are ready"
        )
        problems = (f"; {problem.word}: {problem.message}" for problem in self.problems)
        return words + next(problems, "")

    @property
    def problems(self) -> Iterator[Reason]:
        """Why sandboxes of the pool do not start, as far as known."""
        return (view.problem for view in self.watch.views.values() if view.problem is not None and view.ending is None)


class Pools:
    """Finds the pool for a Sandbox. The keys are files, which the operator has mounted for the pools that existed when the
    job started.
    """

    def __init__(self, job: RolloutJob, api: KubeApi, changed: Changed, folder: Path = Path(POOLS_FOLDER)) -> None:
        self._job, self._api, self._changed, self._folder = job, api, changed, folder
        self._choice = job.spec.sandbox.pool
        self.by_name: dict[str, Pool] = {}
        self._gone: list[Pool] = []
        self._told: set[tuple[str, str]] = set()
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the pools. Raises ApiError if the API server does not respond."""
        if self._choice == "None" or not self._folder.is_dir():
            return
        await self._read()
        self._reading = asyncio.create_task(repeat(self._read_again, READ_SECONDS))

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        for pool in [*self.by_name.values(), *self._gone]:
            await pool.watch.stop()

    def fitting(self, wanted: SandboxSpec) -> Pool | None:
        """Return the first pool that fits. Raises SandboxFailure if the job names one that does not."""
        reasons: Mapping[str, str] = {
            name: why_unfit(pool.described.spec.sandbox, wanted, self._job.spec.sandbox, self._job.spec.security)
            for name, pool in sorted(self.by_name.items())
            if self._choice in ("Auto", name)
        }
        for name, why in reasons.items():
            if not why and (self._choice == name or self.by_name[name].has_sandboxes):
                return self.by_name[name]
            if (name, why) not in self._told:
                self._told.add((name, why))
                log.info("SandboxPool %s is not used: %s", name, why or "it has no sandboxes")
        if self._choice not in ("Auto", "None"):
            why = reasons.get(self._choice, "it does not exist, or was created after the job had started")
            raise SandboxFailure(
                "PoolUnfit", f"SandboxPool {self._choice} (sandbox.pool) cannot be used: {why}; choose another, or Auto"
            )
        return None

    @property
    def reachable(self) -> list[tuple[Pool, SandboxView]]:
        """The ready Sandboxes of all pools, draining ones included."""
        return [
            (pool, view) for pool in self.by_name.values() for view in pool.watch.views.values() if view.can_be_reached
        ]

    def view(self, name: str) -> tuple[Pool, SandboxView] | None:
        """Return the pool that has the Sandbox of that name, and the Sandbox."""
        return next(
            ((pool, view) for pool in self.by_name.values() if (view := pool.watch.views.get(name)) is not None), None
        )

    async def _read_again(self) -> None:
        with contextlib.suppress(ApiError):
            await self._read()

    async def _read(self) -> None:
        found = {pool.metadata.name: pool for pool in map(_parsed, await self._api.list_sandbox_pools()) if pool}
        for name in self.by_name.keys() - found.keys():
            log.warning("SandboxPool %s was deleted; further workspaces get sandboxes of the job's own", name)
            self._forget(name)
        for name, described in found.items():
            known = self.by_name.get(name)
            if known is not None and known.uid == described.metadata.uid:
                known.described = described
                continue
            if known is not None:
                self._forget(name)
            with contextlib.suppress(OSError):
                key_file = self._folder / name / KEY_FILE
                key_file.read_text()
                uid = str(described.metadata.uid)
                watch = SandboxWatch(self._api, f"{POOL_UID_LABEL}={uid}", self._changed)
                pool = Pool(name, uid, key_file, described, watch)
                await watch.start()
                self.by_name[name] = pool

    def _forget(self, name: str) -> None:
        pool = self.by_name.pop(name)
        pool.is_gone = True
        self._gone.append(pool)


def order(names: Iterable[str], runner: str) -> list[str]:
    """Return the names in an order that differs from runner to runner, so that they begin with different sandboxes."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{runner}/{name}".encode()).digest())


def _parsed(found: Mapping[str, Any]) -> SandboxPool | None:
    """Return a pool; None if it was written for another version."""
    try:
        # Other fields of the status may be those of a newer operator.
        status = {"conditions": found.get("status", {}).get("conditions", [])}
        return SandboxPool.model_validate({"metadata": found["metadata"], "spec": found["spec"], "status": status})
    except (ValidationError, KeyError):
        return None
