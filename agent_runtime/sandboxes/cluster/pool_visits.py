"""Short connections to sandboxes of pools in which this runner has workspaces that nothing uses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Sequence, Set

from agent_runtime.sandboxes.base import Fenced, SandboxFailure
from agent_runtime.sandboxes.cluster.held_sandbox import HeldSandbox
from agent_runtime.sandboxes.cluster.pools import Pool, Pools
from agent_runtime.sandboxes.cluster.sandbox_object import SandboxView

# Interval of attempts to reach a lost sandbox, and the time limit of each.
REGAIN_SECONDS = 20.0
VISIT_SECONDS = 10.0
AT_ONCE = 32

log = logging.getLogger(__name__)


class PoolVisits:
    """Destroys such workspaces. `visitor` makes the connection to a sandbox, by its name and pool."""

    def __init__(self, pools: Pools, visitor: Callable[[str, Pool], HeldSandbox]) -> None:
        self._pools, self._visitor = pools, visitor
        self._lost: dict[str, set[tuple[str, str]]] = {}
        """Attempts and names of workspaces that were lost with their Sandbox, which could not be reached, by its uid."""

    def is_lost(self, view: SandboxView) -> bool:
        """Whether the Sandbox could not be reached, and has not been regained."""
        return view.uid in self._lost

    def lose(self, view: SandboxView, identities: Iterable[str]) -> None:
        """Take note of a Sandbox that could not be reached, and of this runner's workspaces in it."""
        self._lost[view.uid] = {
            (attempt, name.partition(".")[0])
            for attempt, _, name in (identity.partition(".") for identity in identities)
        }

    async def regain(self, view: SandboxView) -> None:
        """Wait until a lost Sandbox can be reached again, and destroy the workspaces that were lost with it."""
        lost = self._lost[view.uid]

        def is_lost(attempt: str, name: str) -> bool:
            return (attempt, name.partition(".")[0]) in lost

        try:
            while True:
                await asyncio.sleep(REGAIN_SECONDS)
                found = self._pools.view(view.name)
                if found is None or found[1].uid != view.uid or found[1].ending is not None:
                    return
                if found[1].can_be_reached and await self._visit(*found, is_lost) is not None:
                    log.info("sandbox %s of SandboxPool %s can be reached again", view.name, found[0].name)
                    return
        finally:
            del self._lost[view.uid]

    async def sweep(
        self, unwanted: Callable[[str, str], bool], *, but: Container[str]
    ) -> Sequence[tuple[Pool, SandboxView, Set[str]]]:
        """Destroy unwanted workspaces of an earlier process in all Sandboxes but those of these names, draining ones
        included. Those that do not answer within a few seconds are left to the operator, which destroys them after the
        job's end. Return the others, each with its remaining workspaces.
        """
        at_once = asyncio.Semaphore(AT_ONCE)

        async def visit(pool: Pool, view: SandboxView) -> tuple[Pool, SandboxView, Set[str]]:
            async with at_once:
                return pool, view, await self._visit(pool, view, unwanted) or set()

        visits = [visit(pool, view) for pool, view in self._pools.reachable if view.name not in but]
        return await asyncio.gather(*visits)

    async def _visit(self, pool: Pool, view: SandboxView, unwanted: Callable[[str, str], bool]) -> Set[str] | None:
        """Destroy unwanted workspaces in one Sandbox. Return the remaining ones, of all jobs; None if its executor did not
        answer.
        """
        visitor = self._visitor(view.name, pool)
        try:
            async with asyncio.timeout(VISIT_SECONDS):
                await visitor.connect(view)
                if visitor.sandbox is not None:
                    await visitor.sandbox.sweep(unwanted)
                    await visitor.recount()
        except (SandboxFailure, Fenced, TimeoutError):
            return None
        finally:
            await visitor.close(delete=False)
        return visitor.foreign
