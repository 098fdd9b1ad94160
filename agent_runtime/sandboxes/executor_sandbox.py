"""One sandbox, known by its executor: prepares groups in it, waits for places, makes and finds workspaces.

`Overlay`: a group is prepared once, frozen, and forked for each attempt. `Plain`: the one workspace is prepared in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agent_runtime.sandboxes.base import Fence, Fenced, SandboxFailure, WorkspaceLimit, WorkspaceSpec
from agent_runtime.sandboxes.executor_client import ExecutorClient, Hold
from agent_runtime.sandboxes.executor_workspace import ExecutorWorkspace
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN, PreparedGroups, prepare

# A release of ours wakes those who wait for a place at once; this finds places that another process's release left.
PLACE_POLL_SECONDS = 0.25
# Preparing is the same whoever does it and repeats exactly by its keys, so all runners share one hold.
PREPARING = Fence(epoch=1, holder="prepare")
# Nobody comes after a sweep: what is swept has ended, and its names are never given again.
SWEEPING = Fence(epoch=2**53, holder="sweep")
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def workspace_id(attempt: str, name: str) -> str:
    """Id of an attempt's workspace, also the executor's name for the attempt: each has its own keys and fence, and ends
    as a whole. Names that an id cannot carry are told apart by a digest.
    """
    wanted = f"{attempt}.{name}"
    if SAFE_ID.fullmatch(wanted):
        return wanted
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:16]
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"w{wanted[:60]}") + f"-{digest}"


def no_place(workspace: str, seconds: float) -> SandboxFailure:
    """The failure of a workspace that waited for a place in vain."""
    return SandboxFailure(
        "NoPlace",
        f"no place for workspace {workspace} came free in {seconds:g} s (sandbox.startSeconds); raise it, or "
        "lower runners.concurrency",
    )


class ExecutorSandbox:
    """A sandbox whose executor answers.

    `environment` is what every command gets under the spec's own. `released` is awaited after each release of a workspace,
    with its id. With `waits_for_places` a workspace waits here until one is free, else it fails with NoPlace at once.
    """

    def __init__(
        self,
        client: ExecutorClient,
        *,
        mode: str,
        description: Mapping[str, Any],
        handle: Mapping[str, Any],
        environment: Mapping[str, str],
        idle_seconds: float,
        released: Callable[[str], Awaitable[None]] | None = None,
        waits_for_places: bool = True,
    ) -> None:
        self.client, self.mode = client, mode
        self._released, self._waits_for_places = released, waits_for_places
        self._description, self._handle, self._environment = description, handle, environment
        self._groups = PreparedGroups(self._make_prepared, self._drop_prepared)
        self._waiting, self._place_freed = asyncio.Lock(), asyncio.Event()
        self._cleanups: set[asyncio.Task[None]] = set()
        self._pulse = asyncio.create_task(self._keep_alive(idle_seconds / 3))

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        """See SandboxProvider."""
        identity = workspace_id(attempt, name)
        if self.mode == "Plain":
            return await self._acquire_in_place(spec, Hold(identity, fence))
        prepared = await self._groups.fork_of(spec)
        workspace = self._workspace(spec, Hold(identity, fence), prepared)
        try:
            await self._create(workspace, prepared, spec.start_seconds)
        except (SandboxFailure, Fenced):
            await self._groups.fork_ended(prepared)
            raise
        except asyncio.CancelledError:
            # It may have been made all the same, and would keep its place with nobody to release it.
            cleanup = asyncio.create_task(workspace.release())
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleaned_up)
            raise
        return workspace

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        """See SandboxProvider; `handle` was given by this very sandbox, in this process or an earlier one."""
        if handle["bootId"] != self.client.boot_id:
            raise SandboxFailure(
                "SandboxLost",
                f"workspace {handle['workspace']} lived in an executor that has ended (boot id {handle['bootId']}, "
                f"now {self.client.boot_id})",
            )
        workspace = self._workspace(spec, Hold(handle["workspace"], fence), handle["prepared"])
        # Frozen: the earlier process died between keeping a checkpoint and recording it, and this one repeats the fork.
        # Ended by its own programs: the next call in it raises the same WorkspaceLimit that the earlier process would get.
        with contextlib.suppress(WorkspaceLimit):
            await workspace.require_live(or_frozen=True)
        await workspace.fence()
        if handle["prepared"] is not None:
            self._groups.adopt(handle["prepared"], spec.group)
        return workspace

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider."""
        for workspace in (await self.client.call("GET", "/workspaces")).json()["workspaces"]:
            attempt, dot, name = workspace["id"].partition(".")
            if dot and unwanted(attempt, name):
                spec = WorkspaceSpec(group="swept", working_dir="/")
                swept = self._workspace(spec, Hold(workspace["id"], SWEEPING), None)
                await swept.fence()
                await swept.release()

    async def forget_group(self, group: str) -> None:
        """See SandboxProvider."""
        await self._groups.forget(group)

    async def close(self) -> None:
        """Close the connection; the sandbox lives on until its idle time is over."""
        ending = [self._pulse, *self._cleanups]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self.client.close()

    def _cleaned_up(self, cleanup: asyncio.Task[None]) -> None:
        self._cleanups.discard(cleanup)
        if not cleanup.cancelled():
            # Fenced: the newer runner's workspace now, and its to release.
            cleanup.exception()

    def _workspace(self, spec: WorkspaceSpec, hold: Hold, prepared: str | None) -> ExecutorWorkspace:
        async def released() -> None:
            self._place_freed.set()
            if prepared is not None:
                await self._groups.fork_ended(prepared)
            if self._released is not None:
                await self._released(hold.attempt)

        handle = {
            **self._handle,
            "bootId": self.client.boot_id,
            "workspace": hold.attempt,
            "prepared": prepared,
        }
        description = {**self._description, "image": spec.image}

        def sibling(name: str) -> ExecutorWorkspace:
            return self._workspace(spec, Hold(name, hold.fence), None)

        async def forked(name: str, parent: str) -> ExecutorWorkspace:
            fork = sibling(workspace_id(hold.attempt.partition(".")[0], name))
            await self._create(fork, parent, spec.start_seconds)
            return fork

        return ExecutorWorkspace(
            self.client,
            hold,
            hold.attempt,
            spec,
            handle=handle,
            description=description,
            released=released,
            sibling=sibling,
            forked=forked,
        )

    async def _create(self, workspace: ExecutorWorkspace, parent: str | None, patience: float) -> None:
        """Create it as soon as there is a place. Those who wait stand in line: one asks, the others wait for it."""
        try:
            async with asyncio.timeout(patience):
                if await self._created(workspace, parent):
                    return
                if not self._waits_for_places:
                    raise SandboxFailure("NoPlace", f"the sandbox has no place for workspace {workspace.name}")
                async with self._waiting:
                    while True:
                        self._place_freed.clear()
                        if await self._created(workspace, parent):
                            return
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._place_freed.wait(), PLACE_POLL_SECONDS)
        except TimeoutError as error:
            raise no_place(workspace.name, patience) from error

    async def _created(self, workspace: ExecutorWorkspace, parent: str | None) -> bool:
        try:
            await workspace.create(parent, self._environment)
        except SandboxFailure as failure:
            if failure.reason != "NoPlace":
                raise
            return False
        return True

    async def _acquire_in_place(self, spec: WorkspaceSpec, hold: Hold) -> ExecutorWorkspace:
        workspace = self._workspace(spec, hold, None)
        await self._create(workspace, None, spec.start_seconds)
        await prepare(workspace, spec)
        # A fork has none of the processes that the setup left either.
        await workspace.kill_all(key=f"{LIFECYCLE_TURN}:setup-end")
        await workspace.set_network("None", key=f"{LIFECYCLE_TURN}:setup-network-end")
        return workspace

    async def _make_prepared(self, name: str, spec: WorkspaceSpec) -> None:
        workspace = self._workspace(spec, Hold(name, PREPARING), None)
        await self._create(workspace, None, spec.start_seconds)
        try:
            await prepare(workspace, spec)
            await workspace.freeze()
        except Exception:
            # Its keys would repeat the failure to the next one who asks.
            await workspace.release()
            raise
        self._place_freed.set()

    async def _drop_prepared(self, name: str) -> None:
        with contextlib.suppress(SandboxFailure):
            await self.client.call("DELETE", f"/attempts/{name}", hold=Hold(name, PREPARING))

    async def _keep_alive(self, seconds: float) -> None:
        """A long model call must not look like a runner that has gone."""
        while True:
            await asyncio.sleep(seconds)
            with contextlib.suppress(SandboxFailure):
                await self.client.health()
