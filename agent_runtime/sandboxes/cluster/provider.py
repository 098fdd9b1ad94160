"""Implements SandboxProvider on a cluster: workspaces in pods, which the operator makes of this runner's Sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.sandboxes.base import Fence, Fenced, SandboxFailure, SetupFailed, WorkspaceSpec
from agent_runtime.sandboxes.cluster.api import ApiError, KubeApi
from agent_runtime.sandboxes.cluster.fleet import Fleet
from agent_runtime.sandboxes.cluster.held_sandbox import PROVIDER, HeldSandbox
from agent_runtime.sandboxes.executor_client import Hold
from agent_runtime.sandboxes.executor_sandbox import no_place, workspace_id
from agent_runtime.sandboxes.executor_workspace import ExecutorWorkspace
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Network, WorkspaceMode

# Between two tries at an executor whose places were taken by someone else: as long as making a workspace takes.
NO_PLACE_PAUSE_SECONDS = 0.01


class ClusterProvider:
    """Sandboxes of one shard of a job. `key` is the job's, 64 hex characters."""

    name = PROVIDER

    def __init__(self, job: RolloutJob, shard_index: int, key: str, api: KubeApi) -> None:
        self.warnings: Sequence[str] = ()
        self.on_sandbox_started: Callable[[float], None] = lambda seconds: None
        """Told of each start, in seconds from the request to a ready executor."""
        self._job = job
        self._fleet = Fleet(job, shard_index, key, api, lambda seconds: self.on_sandbox_started(seconds))
        self._tidying: dict[str, asyncio.Task[None]] = {}

    def sandbox_states(self) -> Mapping[str, int]:
        """Sandboxes that this runner holds: `Starting`, `Ready`."""
        return Counter("Starting" if held.sandbox is None else "Ready" for held in self._fleet.held.values())

    def waits_for(self) -> str:
        """Why sandboxes do not start, for a person; empty where nothing is known to stand in their way."""
        return self._fleet.waits_for

    async def open(self) -> None:
        """Find the Sandboxes of an earlier process. Raises SandboxFailure when the API server does not let us."""
        try:
            await self._fleet.open()
        except ApiError as error:
            raise SandboxFailure(
                "ProviderUnavailable",
                f"Sandboxes cannot be listed: {error}; see that the API server answers and that the runner's Role is bound",
            ) from error
        if self._job.spec.sandbox.workspaces.mode is WorkspaceMode.PLAIN:
            self.warnings = plain_warnings(self._job.spec.sandbox.network)

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        """See SandboxProvider."""
        identity = workspace_id(attempt, name)
        started = time.monotonic()
        if (tidying := self._tidying.get(identity)) is not None:
            await asyncio.wait({tidying})
        await self._drop_leftovers(attempt, name)
        while True:
            held = await self._fleet.place(spec, attempt=attempt, identity=identity)
            try:
                sandbox = await held.connected()
                return await sandbox.acquire(spec, attempt=attempt, fence=fence, name=name)
            except SandboxFailure as failure:
                if isinstance(failure, SetupFailed):
                    # It was never made, or in a sandbox that is not used again.
                    self._fleet.leave(held, identity)
                    raise
                if failure.reason != "NoPlace":
                    self._tidy(held, Hold(identity, fence))
                    raise
            except Fenced:
                # It is another runner's now, and its sandbox too.
                held.lose_hold(identity)
                raise
            except BaseException:
                self._tidy(held, Hold(identity, fence))
                raise
            # An earlier process still has workspaces there that we did not know.
            self._fleet.leave(held, identity)
            if time.monotonic() - started > spec.start_seconds:
                raise no_place(identity, spec.start_seconds)
            await asyncio.sleep(NO_PLACE_PAUSE_SECONDS)
            await self._fleet.recount(held)

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        """See SandboxProvider."""
        if handle.get("provider") != PROVIDER:
            raise SandboxFailure(
                "WorkspaceLost",
                f"the workspace is one of provider {handle.get('provider')}, which is not on this cluster",
            )
        held = await self._fleet.find(handle["sandbox"], handle["uid"])
        sandbox = await held.connected()
        held.take(handle["workspace"], handle["prepared"])
        try:
            return await sandbox.reattach(handle, spec=spec, fence=fence)
        except Fenced:
            held.lose_hold(handle["workspace"])
            raise
        except SandboxFailure:
            self._fleet.leave(held, handle["workspace"])
            raise

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider. Sandboxes that are empty then are used again, or given back."""
        ready = [held.sandbox for held in self._fleet.held.values() if held.sandbox is not None]
        await asyncio.gather(*(sandbox.sweep(unwanted) for sandbox in ready), return_exceptions=True)

    async def forget_group(self, group: str) -> None:
        """See SandboxProvider."""
        await self._fleet.forget_group(group)

    async def close(self, *, keep: bool = False) -> None:
        """See SandboxProvider."""
        await asyncio.gather(*self._tidying.values(), return_exceptions=True)
        await self._fleet.close(keep=keep)

    async def _drop_leftovers(self, attempt: str, name: str) -> None:
        """What an earlier process had for this attempt under another name is over: grading follows the agent."""
        for held in list(self._fleet.held.values()):
            if held.sandbox is not None and any(identity.startswith(f"{attempt}.") for identity in held.foreign):
                with contextlib.suppress(SandboxFailure):
                    await held.sandbox.sweep(lambda found, other: found == attempt and other != name)

    def _tidy(self, held: HeldSandbox, hold: Hold) -> None:
        """After a workspace that failed or was cancelled on its way: nothing of it stays, then its place is free."""

        async def tidy() -> None:
            # The sandbox of a Plain one goes as a whole.
            if held.sandbox is not None and held.is_reusable:
                # Fenced: it was never made, because the fence is raised first.
                with contextlib.suppress(SandboxFailure, Fenced):
                    await held.sandbox.client.call("DELETE", f"/attempts/{hold.attempt}", hold=hold)
            self._fleet.leave(held, hold.attempt)

        task = self._tidying[hold.attempt] = asyncio.create_task(tidy())
        task.add_done_callback(lambda _: self._tidying.pop(hold.attempt, None))


def plain_warnings(network: Network) -> list[str]:
    """What `Plain` sandboxes do not isolate."""
    warnings = [
        "Plain sandboxes: each workspace has a pod of its own, which is not reused, and limits are the whole pod's"
    ]
    if not network.setup == network.agent == network.verifier:
        warnings.append("Plain sandboxes: the network is the same in all phases, whatever one of them may reach")
    return warnings
