"""One sandbox, reached through its executor: prepares groups in it; creates, finds and destroys workspaces."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_runtime.sandboxes.base import (
    Fence,
    Fenced,
    FileError,
    SandboxFailure,
    Service,
    SetupFailed,
    StoredLayer,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, ExecutorRefusal, Hold
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN, LayerStates, PreparedGroups, prepare, prepared_id
from agent_runtime.sandboxes.services import ServiceFailed, hosts_file, services_unsupported, start_services
from rollout_api.cluster import MOST_LAYER_BYTES

# Interval of attempts to create a workspace while all places are in use.
PLACE_POLL_SECONDS = 0.25
# Most times that other runners may remove a layer while this one restores it.
MOST_REMOVALS = 20
# All runners share one hold for preparing: it has the same result in every runner, and its keys make it repeatable.
PREPARING = Fence(epoch=1, holder="prepare")
# The highest epoch, because swept workspaces are destroyed and their names are not used again.
SWEEPING = Fence(epoch=2**53, holder="sweep")
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def workspace_id(attempt: str, name: str) -> str:
    """Return the id of an attempt's workspace, also the executor's name for the attempt: each has its own keys and
    fence, and ends as a whole. Names that an id cannot contain are replaced by a digest.
    """
    wanted = f"{attempt}.{name}"
    if SAFE_ID.fullmatch(wanted):
        return wanted
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:16]
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"w{wanted[:60]}") + f"-{digest}"


def no_place(workspace: str, seconds: float) -> SandboxFailure:
    """Return the failure of a workspace that waited for a place too long."""
    return SandboxFailure(
        "NoPlace",
        f"no place for workspace {workspace} became free within {seconds:g} s (sandbox.startSeconds); raise it, or "
        "lower runners.concurrency",
    )


@dataclass
class Lease:
    """A workspace's claim on a place in a sandbox."""

    identity: str
    """Identity of the workspace."""
    attempt: str
    name: str
    spec: WorkspaceSpec
    fence: Fence
    handle: Mapping[str, Any] | None = None
    """Handle of a workspace that an earlier process acquired."""
    prepared: str | None = None
    """The prepared state from which it was forked."""
    kept: bool = False
    """Whether workspace and sandbox are kept for another runner."""
    sandbox: ExecutorSandbox | None = None
    workspaces: dict[str, ExecutorWorkspace] = field(default_factory=dict)
    """The workspace of the lease and its forks, by id."""
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the workspace is usable."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is no longer used."""
    life: asyncio.Task[None] | None = None
    """The coroutine that holds it."""

    async def is_held(self) -> bool:
        """Wait until the workspace is usable: True; or False if the lease has ended instead."""
        assert self.life is not None
        waits_for = {self.life} if self.over.is_set() else {self.life, self.begun}
        await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
        return not self.life.done() and not self.over.is_set()

    def stop(self) -> None:
        """Request its end: workspace and place are freed, unless they are kept."""
        if not self.begun.done() and not self.over.is_set() and self.life is not None:
            self.life.cancel()
        self.over.set()

    async def end(self) -> None:
        """End the lease, and return when it has ended. Raises Fenced if another runner holds the workspace."""
        self.stop()
        assert self.life is not None
        await asyncio.wait({self.life})
        if not self.life.cancelled():
            self.life.result()


class ExecutorSandbox:
    """A sandbox whose executor responds. `environment` is the default environment of every command; the spec's own
    overrides it.
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
        most_layer_bytes: int | None = MOST_LAYER_BYTES,
    ) -> None:
        self.client, self.mode = client, mode
        self._description, self._handle, self._environment = description, handle, environment
        self._groups = PreparedGroups(self._make_prepared, self._drop_prepared)
        self._layers = LayerStates(self._restore_layer, self._drop_prepared, most_layer_bytes)
        self._pulse = asyncio.create_task(client.keep_alive(idle_seconds))

    @contextlib.asynccontextmanager
    async def hosted(self, lease: Lease) -> AsyncIterator[None]:
        """Host the workspace of a lease. At the end, it and its forks are destroyed, unless the lease is kept.

        Raises SandboxFailure("NoPlace") among others.
        """
        async with contextlib.AsyncExitStack() as stack:
            if lease.handle is not None:
                lease.prepared = lease.handle["prepared"]
                if lease.prepared is not None:
                    self._groups.adopt(lease.prepared, lease.spec.group)
                    stack.push_async_callback(self._groups.fork_ended, lease.prepared)
            elif self.mode != "Plain":
                lease.prepared = await self._groups.fork_of(lease.spec)
                stack.push_async_callback(self._groups.fork_ended, lease.prepared)
            for service in lease.spec.services:
                if self.mode == "Plain":
                    raise services_unsupported(self._description)
                if lease.handle is None:
                    try:
                        await self._groups.fork_of(service.workspace)
                    except SetupFailed as failed:
                        raise SetupFailed(f"service {service.name!r}: {failed.message}") from failed
                else:
                    self._groups.adopt(prepared_id(service.workspace), lease.spec.group)
                stack.push_async_callback(self._groups.fork_ended, prepared_id(service.workspace))
            lease.sandbox = self
            try:
                try:
                    await self.enter(lease, lease)
                    yield
                finally:
                    if not lease.kept:
                        await self._destroy_all(lease)
            except Fenced:
                # Another runner has taken over the workspace and its sandbox.
                lease.kept = True
                raise

    async def enter(self, lease: Lease, wanted: Lease) -> ExecutorWorkspace:
        """Return the workspace of a lease under that fence, created or found. Raises as `hosted`."""
        lease.fence = wanted.fence
        workspace = self._workspace(lease, Hold(lease.identity, wanted.fence), lease.prepared)
        if wanted.handle is not None:
            await self._reattach(workspace, wanted.handle)
        else:
            lease.workspaces.setdefault(lease.identity, workspace)
            await workspace.create(lease.prepared, self._environment)
            if self.mode == "Plain":
                await prepare(workspace, lease.spec)
                # Forks have no processes of the setup, so end them here too.
                await workspace.kill_all(key=f"{LIFECYCLE_TURN}:setup-end")
                await workspace.set_network("None", key=f"{LIFECYCLE_TURN}:setup-network-end")
            if lease.spec.services:
                await self._start_services(lease, workspace)
        lease.workspaces[lease.identity] = workspace
        return workspace

    async def _start_services(self, lease: Lease, leader: ExecutorWorkspace) -> None:
        """Start the services of a lease's workspace; may be repeated. Raises ServiceFailed among others."""
        services = lease.spec.services
        started = []
        for service, workspace in zip(services, self._service_workspaces(lease).values(), strict=True):
            lease.workspaces[workspace.name] = workspace
            await workspace.create(prepared_id(service.workspace), self._environment, joins=leader)
            try:
                await self._write_hosts(workspace, services)
            except FileError as error:  # a restored state may have anything in place of /etc
                raise ServiceFailed(service.name, f"cannot get the names of the others: {error.message}") from error
            started.append((service, workspace))
        await start_services(started, completion_seconds=lease.spec.setup_seconds)

    def _service_workspaces(self, lease: Lease) -> dict[str, ExecutorWorkspace]:
        """Return the workspaces of a lease's services, by name, which may not exist."""
        return {
            service.name: self._workspace(
                lease,
                Hold(workspace_id(lease.attempt, f"{lease.name}.service-{service.name}"), lease.fence),
                None,
                service.workspace,
            )
            for service in lease.spec.services
        }

    async def _write_hosts(self, workspace: ExecutorWorkspace, services: Sequence[Service]) -> None:
        key = f"{LIFECYCLE_TURN}:hosts"
        await workspace.write("/etc/hosts", hosts_file(services), key=key, replace=True, owner="0")

    async def sweep(self, unwanted: Callable[[str, str], bool], fence: Fence = SWEEPING) -> None:
        found = (await self.client.call("GET", "/workspaces")).json()["workspaces"]
        # The uppermost first, because the executor does not destroy a workspace below others.
        for workspace in sorted(found, key=lambda workspace: -len(workspace["layers"])):
            attempt, dot, name = workspace["id"].partition(".")
            if dot and unwanted(attempt, name):
                spec = WorkspaceSpec(group="swept", working_dir="/")
                swept = self._workspace(Lease(workspace["id"], attempt, name, spec, fence), None, None)
                await swept.fence()
                await swept.destroy()

    async def is_empty(self) -> bool:
        try:
            return not (await self.client.call("GET", "/workspaces")).json()["workspaces"]
        except SandboxFailure:
            return True

    async def forget_group(self, group: str) -> None:
        await self._groups.forget(group)

    async def close(self) -> None:
        """Close the connection; the sandbox lives until its idle time is over."""
        self._pulse.cancel()
        await asyncio.gather(self._pulse, return_exceptions=True)
        await self.client.close()

    async def _destroy_all(self, lease: Lease) -> None:
        """Destroy a lease's workspaces. Raises Fenced if another runner holds them."""
        for workspace in reversed(list(lease.workspaces.values())):  # forks before what they are based on
            await workspace.destroy()
        if lease.handle is not None:
            own = lease.name.partition(".")[0]
            with contextlib.suppress(SandboxFailure):
                # The earlier process may have made others, which only the executor knows.
                await self.sweep(
                    lambda attempt, name: (attempt, name.partition(".")[0]) == (lease.attempt, own), lease.fence
                )

    async def _reattach(self, workspace: ExecutorWorkspace, handle: Mapping[str, Any]) -> None:
        if handle["bootId"] != self.client.boot_id:
            raise SandboxFailure(
                "SandboxLost", f"the executor of workspace {workspace.name} has ended (its boot id changed)"
            )
        # A frozen workspace: the earlier process died between saving a checkpoint and recording it, and this one
        # repeats the fork. A workspace that exceeded a limit: the next call raises the same WorkspaceLimit.
        with contextlib.suppress(WorkspaceLimit):
            await workspace.require_live(or_frozen=True)
        await workspace.fence()

    def _workspace(
        self, lease: Lease, hold: Hold | None, prepared: str | None, spec: WorkspaceSpec | None = None
    ) -> ExecutorWorkspace:
        hold = hold or Hold(lease.identity, lease.fence)

        async def forked(name: str, parent: str) -> ExecutorWorkspace:
            identity = workspace_id(lease.attempt, name)
            fork = lease.workspaces[identity] = self._workspace(lease, Hold(identity, hold.fence), None)
            await self._create_in_time(fork, parent, lease.spec.start_seconds)
            return fork

        async def discard(name: str) -> None:
            workspace = self._workspace(lease, Hold(name, hold.fence), None)
            await workspace.fence()
            await workspace.destroy()
            lease.workspaces.pop(name, None)

        return ExecutorWorkspace(
            self.client,
            hold,
            spec or lease.spec,
            handle={**self._handle, "bootId": self.client.boot_id, "workspace": hold.attempt, "prepared": prepared},
            description={**self._description, "image": lease.spec.image},
            end=lease.end,
            discard=discard,
            forked=forked,
            services=lambda: self._service_workspaces(lease) if spec is None else {},
        )

    async def _create_in_time(self, workspace: ExecutorWorkspace, parent: str | None, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await workspace.create(parent, self._environment)
                    except SandboxFailure as failure:
                        if failure.reason != "NoPlace":
                            raise
                    await asyncio.sleep(PLACE_POLL_SECONDS)
        except TimeoutError as error:
            raise no_place(workspace.name, seconds) from error

    async def _make_prepared(self, name: str, spec: WorkspaceSpec) -> None:
        # A start state has the content of the volumes, which its forks mount.
        made = spec if spec.start is None else replace(spec, services=(), volumes={})
        workspace = self._workspace(Lease(name, name, "", made, PREPARING), None, None)
        async with self._layers.ready(spec.layers, is_bare=spec.is_bare) as below:
            try:
                await workspace.create(below, self._environment)
                if names := spec.prepares_for or (() if spec.stores_setup else spec.services):
                    # Before the setup, whose own names stay.
                    await self._write_hosts(workspace, names)
                await prepare(workspace, spec)
                await workspace.freeze()
            except BaseException:
                # Destroy it, because a retry with the same keys would get the same failure.
                await workspace.destroy()
                raise

    async def _restore_layer(self, name: str, below: str | None, layer: StoredLayer, is_bare: bool) -> None:
        # Without limits, because a layer is not the work of the task that starts from it.
        spec = WorkspaceSpec(group="layers", working_dir="/", is_bare=is_bare)
        workspace = self._workspace(Lease(name, name, "", spec, PREPARING), None, None)
        removals = 0
        while not await workspace.is_frozen():  # another runner may have restored it
            try:
                await self._create_in_time(workspace, below, spec.start_seconds)
                await workspace.restore(layer.load(), key=f"{LIFECYCLE_TURN}:restore")
                await workspace.freeze()
            except BaseException as error:
                # Another runner has removed it, because that runner's own part in restoring it failed.
                was_removed = isinstance(error, Fenced) or (
                    isinstance(error, ExecutorRefusal) and error.reason in ("Forgotten", "NotFound")
                )
                removals += was_removed
                if was_removed and removals <= MOST_REMOVALS:
                    await asyncio.sleep(PLACE_POLL_SECONDS)
                    continue
                if not was_removed and not await workspace.is_frozen():
                    await workspace.destroy()
                if isinstance(error, Fenced):
                    raise SandboxFailure(
                        "LayerUnusable", f"other runners remove a layer again and again: {error}"
                    ) from error
                if isinstance(error, FileError):
                    raise SandboxFailure("LayerUnusable", f"a layer cannot be restored here: {error}") from error
                raise

    async def _drop_prepared(self, name: str) -> None:
        # The executor reports a forgotten state as fenced.
        with contextlib.suppress(SandboxFailure, Fenced):
            await self.client.call("DELETE", f"/attempts/{name}", hold=Hold(name, PREPARING))
