"""Leases of places in sandboxes, from the request to the end of the workspace. One coroutine holds each lease, with
place and workspace as nested contexts, so that places are always released.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from agent_runtime.sandboxes.base import Fence, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.sandbox import ExecutorSandbox, Lease, no_place, workspace_id
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace

# Pause between attempts at an executor whose places another process uses: the time to create a workspace.
NO_PLACE_PAUSE_SECONDS = 0.01

log = logging.getLogger(__name__)

Place = Callable[[Lease], AbstractAsyncContextManager[ExecutorSandbox]]
"""A sandbox with a place for the lease's workspace, reserved until the context ends; a `kept` lease keeps both."""


class LeasePool:
    """The leases of one provider, by the id of their workspaces."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._leases: dict[str, Lease] = {}

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        return await self._take(Lease(workspace_id(attempt, name), attempt, name, spec, fence))

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        attempt, _, name = handle["workspace"].partition(".")
        return await self._take(Lease(handle["workspace"], attempt, name, spec, fence, handle))

    async def close(self) -> None:
        """Release all workspaces; they and their sandboxes are kept, except those that are being destroyed."""
        lives = [lease.life for lease in self._leases.values() if lease.life is not None]
        for lease in self._leases.values():
            lease.kept = lease.kept or not lease.over.is_set()
            lease.stop()
        await asyncio.gather(*lives, return_exceptions=True)

    async def _take(self, wanted: Lease) -> ExecutorWorkspace:
        while (held := self._leases.get(wanted.identity)) is not None:
            if await held.is_held():
                assert held.sandbox is not None  # set while the lease is held
                return await held.sandbox.enter(held, wanted)
        self._leases[wanted.identity] = wanted
        wanted.life = asyncio.create_task(self._live(wanted))
        wanted.life.add_done_callback(lambda life: life.cancelled() or life.exception())
        try:
            if not await wanted.is_held():
                if wanted.life.cancelled():
                    raise SandboxFailure("ProviderUnavailable", "the sandbox provider was closed")
                wanted.life.result()
        except BaseException:
            wanted.stop()
            raise
        return wanted.workspaces[wanted.identity]

    async def _live(self, lease: Lease) -> None:
        # Without the time of waiting for a place: others may use all of them for hours.
        refused_seconds = 0.0
        was_lost = False
        try:
            while True:
                placed_at = None
                try:
                    async with self._place(lease) as sandbox:
                        placed_at = time.monotonic()
                        async with sandbox.hosted(lease):
                            lease.begun.set_result(None)
                            await lease.over.wait()
                    return
                except (SandboxFailure, OSError) as failure:
                    if lease.begun.done():
                        log.warning("workspace %s: its sandbox was not ended: %s", lease.identity, failure)
                        return
                    if isinstance(failure, OSError):
                        raise
                    if failure.reason == "NoPlace":
                        if placed_at is None:
                            raise
                        refused_seconds += time.monotonic() - placed_at + NO_PLACE_PAUSE_SECONDS
                        if refused_seconds > lease.spec.start_seconds:
                            raise no_place(lease.identity, lease.spec.start_seconds) from failure
                    elif was_lost or failure.reason != "SandboxLost" or lease.handle is not None:
                        raise
                    # If the sandbox had ended before the workspace was created, try once more.
                    was_lost = was_lost or failure.reason == "SandboxLost"
                await asyncio.sleep(NO_PLACE_PAUSE_SECONDS)
        finally:
            del self._leases[lease.identity]
