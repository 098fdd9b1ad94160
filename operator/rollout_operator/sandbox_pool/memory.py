"""Plan what new sandboxes of a pool request of memory: what workspaces of its sandboxes have used. No side effects.

The executors report sums since their start. The pool's status keeps those of sandboxes that have ended, so that a restarted
operator resumes with them.
"""

import math
from collections.abc import Sequence
from typing import Final

from rollout_api.base import quantity, quantity_value
from rollout_api.measured_memory import KEPT_SECONDS, Measured, request_of, stepped
from rollout_api.sandbox_pool import PoolMemory, SandboxPoolSpec
from rollout_operator.actions import Remember
from rollout_operator.sandbox_pool.observe import Member, Observed, request_fact, use_fact

REQUEST_SECONDS: Final = 60.0
"""Shortest time between two changes of the request, each of which is written into the status."""
ENDED_SECONDS: Final = 600.0
"""Longest time for which the Sandbox object of an ended sandbox is expected to exist."""


def plan_memory(seen: Observed, spec: SandboxPoolSpec) -> tuple[PoolMemory | None, int | None, list[Remember]]:
    """Return the status, the request of a new sandbox in bytes, and what to remember; None where nothing is measured."""
    limit, before = spec.sandbox.resources.measured_limit, seen.status.memory or PoolMemory()
    if limit is None:
        return None, None, []
    ended = [member for member in seen.members if member.has_ended or member.is_empty]
    counted = [member for member in ended if member.report is not None and not member.is_counted]
    live = [member for member in seen.members if member not in ended]
    kept = (_sums(before) + _used(seen, spec, counted, limit)).within(KEPT_SECONDS)
    request = None if before.request is None else math.floor(min(limit, quantity_value(before.request)))
    learned = [Remember(use_fact(member.uid), "", ENDED_SECONDS) for member in counted]
    # After a restart of the operator, the status alone may lack most of the use.
    if not seen.keeps_request and all(member.report is not None for member in live if member.is_ready):
        total = kept + _used(seen, spec, live, limit)
        fresh = stepped(request, request_of(total, limit, spec.sandbox.per_sandbox))
        if fresh != request:
            request = fresh
            learned.append(Remember(request_fact(seen.uid), "", REQUEST_SECONDS))
    shown = None if request is None else quantity(request)
    return PoolMemory(**dict(kept), request=shown), request, learned


def _sums(status: PoolMemory) -> Measured:
    return Measured(**{name: getattr(status, name) for name in Measured.model_fields})


def _used(seen: Observed, spec: SandboxPoolSpec, members: Sequence[Member], limit: float) -> Measured:
    """Return the sum of what these have reported. Each counts for no more time than all of its places had."""
    total = Measured()
    for member in members:
        if member.report is not None:
            age = max(0.0, (seen.now - member.created).total_seconds())
            total += member.report.measured.believed(limit, age * spec.sandbox.per_sandbox)
    return total
