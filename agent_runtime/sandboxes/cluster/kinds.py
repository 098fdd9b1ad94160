"""Kinds of sandboxes, and the requests that wait for one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from agent_runtime.sandboxes.cluster.held_sandbox import HeldSandbox
from agent_runtime.sandboxes.cluster.pools import Pool
from agent_runtime.sandboxes.cluster.sandbox_object import kind_of
from rollout_api.measured_memory import Measured, request_of
from rollout_api.sandbox import SandboxSpec


class MemoryRecords(Protocol):
    """What workspaces of earlier runs have used of memory, by the kind of their sandboxes. No method raises an error."""

    async def read(self, kind: str) -> Measured:
        """Return what is known."""

    async def write(self, kind: str, used: Measured) -> None:
        """Store what later runs are to know."""


@dataclass
class Waiter:
    """A request that waits for a place."""

    number: int
    identity: str
    group: str
    spec: SandboxSpec
    """The Sandbox that it needs."""
    kind: str
    """Key of the kind for which it waits."""
    placed: asyncio.Future[HeldSandbox]
    lost_starts: int = 0


@dataclass
class Kind:
    """All sandboxes that are equal except for their names, and the requests that wait for one."""

    key: str
    spec: SandboxSpec
    places: int
    """Expected places of the next sandbox: the requested number, or the number that an earlier one had."""
    is_reusable: bool
    pool: Pool | None = None
    """The SandboxPool whose sandboxes are used, instead of own ones."""
    is_alone: bool = False
    """Each attempt of this kind gets a new sandbox, which hosts no other attempt before or after it."""
    waiting: list[Waiter] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    """All groups of rollouts that ever requested one."""
    room_used_at: float = float("-inf")
    """When its requests last lacked room that other sandboxes used (`time.monotonic`)."""
    earlier: Measured | None = None
    """What workspaces of earlier runs have used of memory; None if not read yet."""
    measured: dict[str, Measured] = field(default_factory=dict)
    """What workspaces have used of memory, by sandbox, also of those that have ended."""
    measuring: asyncio.Task[None] | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether it has the spec that a pool had earlier, or its pool was deleted."""
        return self.pool is not None and (self.pool.is_gone or self.key != pool_key(self.pool, self.pool.spec))

    @property
    def measured_in_all(self) -> Measured:
        """Return what workspaces have used of memory, also in earlier runs."""
        return sum(self.measured.values(), self.earlier or Measured())

    @property
    def measured_request(self) -> int | None:
        """Return the bytes of memory to request for each workspace because of measured use; None if too little is known, or
        requests do not follow it.
        """
        limit = self.spec.resources.measured_limit
        if limit is None:
            return None
        return request_of(self.measured_in_all, limit, self.spec.workspaces.per_sandbox or 1)

    @property
    def unused(self) -> float:
        """Return the seconds since its requests lacked room that other sandboxes used; infinite if they never did."""
        return time.monotonic() - self.room_used_at

    def age_of(self, held: HeldSandbox) -> float:
        """Return the seconds for which one of the sandboxes has existed at most."""
        return self.spec.lifetime_seconds if held.is_adopted else held.seconds()


def pool_key(pool: Pool, spec: SandboxSpec) -> str:
    """Return the key of the kind of a pool's sandboxes with that spec."""
    return f"pool-{pool.uid}-{kind_of(spec)}"
