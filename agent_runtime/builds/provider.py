"""A provider whose workspaces may start from a Dockerfile or a stored setup, which is built first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from agent_runtime.builds.build import Builder
from agent_runtime.builds.cache import LayerLost
from agent_runtime.sandboxes.base import Fence, SandboxProvider, SandboxReporter, Workspace, WorkspaceSpec

MOST_LOSSES: Final = 64
"""Damaged layers for one workspace. More indicate a storage that damages everything."""


class BuildingProvider:
    """Implements SandboxProvider: completes each specification by its Dockerfile and stored setup; forwards all else."""

    def __init__(self, provider: SandboxProvider, builder: Builder) -> None:
        self._provider, self._builder = provider, builder
        self.name, self.warnings = provider.name, provider.warnings

    async def open(self) -> None:
        await self._provider.open()
        self.warnings = self._provider.warnings

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> Workspace:
        losses = 0
        while True:
            try:
                completed = await self._builder.completed(spec)
                return await self._provider.acquire(completed, attempt=attempt, fence=fence, name=name)
            except LayerLost:
                # A damaged layer is found when it is restored, one at a time, and is made again.
                losses += 1
                if losses > MOST_LOSSES:
                    raise

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> Workspace:
        # It has its files already, so no setup needs to be found or made.
        completed = await self._builder.completed(dataclasses.replace(spec, stores_setup=False))
        return await self._provider.reattach(handle, spec=completed, fence=fence)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        await self._provider.sweep(unwanted)

    def sandbox_states(self) -> Mapping[str, int]:
        """See SandboxReporter. Empty if the provider does not report."""
        return self._provider.sandbox_states() if isinstance(self._provider, SandboxReporter) else {}

    def waits_for(self) -> str:
        """See SandboxReporter."""
        return self._provider.waits_for() if isinstance(self._provider, SandboxReporter) else ""

    async def forget_group(self, group: str) -> None:
        self._builder.forget_group(group)
        await self._provider.forget_group(group)

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        await self._builder.close()
        await self._provider.close(keep=keep, at_most=at_most)
