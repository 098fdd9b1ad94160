"""Implements SandboxProvider on a cluster: workspaces in pods, which the operator creates from this runner's Sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_runtime.kube.api import ApiError, KubeApi
from agent_runtime.sandboxes.base import Fence, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.cluster.fleet import Fleet
from agent_runtime.sandboxes.cluster.held_sandbox import PROVIDER, HeldSandbox
from agent_runtime.sandboxes.cluster.kinds import MemoryRecords
from agent_runtime.sandboxes.executor_client.sandbox import ExecutorSandbox, Lease
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from agent_runtime.sandboxes.pool import LeasePool
from rollout_api.cluster import POOLS_FOLDER, job_tag
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Network, WorkspaceMode


class ClusterProvider:
    """Sandboxes of one shard of a job. `key` is the job's key, 64 hexadecimal characters. `memory` has what sandboxes of
    earlier runs have used.
    """

    name = PROVIDER

    def __init__(
        self,
        job: RolloutJob,
        shard_index: int,
        key: str,
        api: KubeApi,
        pools_folder: Path = Path(POOLS_FOLDER),
        memory: MemoryRecords | None = None,
    ) -> None:
        self.warnings: Sequence[str] = ()
        self.on_sandbox_started: Callable[[float], None] = lambda seconds: None
        """Called with the duration of each start, from the request to a ready executor."""
        self._job = job
        # Several jobs, and runners of one, share the executors of a SandboxPool.
        self._tenant = f"{job_tag(str(job.metadata.uid))}{shard_index}-"
        self._fleet = Fleet(
            job,
            shard_index,
            key,
            api,
            lambda seconds: self.on_sandbox_started(seconds),
            self._tenant,
            pools_folder,
            memory,
        )
        self._pool = LeasePool(self._place)

    def sandbox_states(self) -> Mapping[str, int]:
        """See SandboxReporter."""
        return Counter("Starting" if held.sandbox is None else "Ready" for held in self._fleet.held.values())

    def wanted(self) -> Mapping[str, int]:
        """Return the places that it wants in each SandboxPool, used ones included."""
        return self._fleet.wanted()

    def waits_for(self) -> str:
        """See SandboxReporter."""
        return self._fleet.waits_for

    async def open(self) -> None:
        """Find the Sandboxes of an earlier process. Raises SandboxFailure if the API server denies access."""
        try:
            await self._fleet.open()
        except ApiError as error:
            raise SandboxFailure(
                "ProviderUnavailable",
                f"Sandboxes cannot be listed: {error}; check the API server and the binding of the runner's Role",
            ) from error
        if self._job.spec.sandbox.workspaces.mode is WorkspaceMode.PLAIN:
            self.warnings = plain_warnings(self._job.spec.sandbox.network)

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        return await self._pool.acquire(self._own(spec), attempt=f"{self._tenant}{attempt}", fence=fence, name=name)

    def _own(self, spec: WorkspaceSpec) -> WorkspaceSpec:
        """Return the specification, and those of its services, with this runner as the tenant."""
        services = [replace(service, workspace=self._own(service.workspace)) for service in spec.services]
        return replace(spec, tenant=self._tenant, services=services)

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        if handle.get("provider") != PROVIDER:
            raise SandboxFailure(
                "WorkspaceLost",
                f"the workspace belongs to provider {handle.get('provider')}, which is not available on this cluster",
            )
        return await self._pool.reattach(handle, spec=self._own(spec), fence=fence)

    @contextlib.asynccontextmanager
    async def _place(self, lease: Lease) -> AsyncIterator[ExecutorSandbox]:
        if lease.handle is None:
            await self._drop_leftovers(lease.attempt, lease.name)
            held = await self._fleet.place(lease.spec, attempt=lease.attempt, identity=lease.identity)
        else:
            held = await self._fleet.find(lease.handle["sandbox"], lease.handle["uid"])
            held.take(lease.identity, lease.handle["prepared"])
        try:
            yield await held.connected()
        except SandboxFailure as failure:
            if failure.reason == "NoPlace":
                # Workspaces of an earlier process use its places.
                self._fleet.leave(held, lease.identity)
                await self._fleet.recount(held)
            raise
        finally:
            if lease.kept:
                held.lose_hold(lease.identity)
            else:
                self._fleet.leave(held, lease.identity)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider. Sandboxes that are empty afterwards are used again, or deleted."""

        def is_unwanted(attempt: str, name: str) -> bool:
            return attempt.startswith(self._tenant) and unwanted(attempt.removeprefix(self._tenant), name)

        ready = [held for held in self._fleet.held.values() if held.sandbox is not None]
        await asyncio.gather(
            self._fleet.sweep_pools(is_unwanted),
            *(self._swept(held, is_unwanted) for held in ready),
            return_exceptions=True,
        )

    async def _swept(self, held: HeldSandbox, unwanted: Callable[[str, str], bool]) -> None:
        if held.sandbox is not None:
            await held.sandbox.sweep(unwanted)
            await self._fleet.recount(held)

    async def forget_group(self, group: str) -> None:
        await self._fleet.forget_group(group)

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        await self._pool.close()
        await self._fleet.close(keep=keep)

    async def _drop_leftovers(self, attempt: str, name: str) -> None:
        """Destroy this attempt's earlier workspaces with another name, which are obsolete: grading follows the agent. Those
        of its services stay: an earlier process that died while they started has left them, and they are started again.
        """

        def is_obsolete(found: str, other: str) -> bool:
            return found == attempt and other.partition(".")[0] != name.partition(".")[0]

        for held in list(self._fleet.held.values()):
            if held.sandbox is not None and any(identity.startswith(f"{attempt}.") for identity in held.foreign):
                with contextlib.suppress(SandboxFailure):
                    await self._swept(held, is_obsolete)


def plain_warnings(network: Network) -> list[str]:
    """Return what `Plain` sandboxes do not isolate."""
    warnings = [
        "Plain sandboxes: each workspace has its own pod, which is not reused, and limits apply to the whole pod"
    ]
    if not network.setup == network.agent == network.verifier:
        warnings.append("Plain sandboxes: the network access is the same in all phases")
    return warnings
