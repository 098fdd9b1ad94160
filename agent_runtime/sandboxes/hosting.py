"""Sandboxes whose executors this process starts: in `Overlay` one for each image, in `Plain` one for each workspace."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_runtime.sandboxes.base import Fence, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.client import ExecutorClient
from agent_runtime.sandboxes.executor_client.sandbox import ExecutorSandbox, Lease, no_place
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from agent_runtime.sandboxes.pool import LeasePool


class Executor(Protocol):
    """A running executor and its client."""

    client: ExecutorClient
    mode: str
    """Overlay or Plain."""

    async def stop(self) -> None:
        """End the sandbox and its workspaces, and remove its files. Idempotent."""


class Executors(Protocol):
    """Starts executors by name, so that the next process finds them."""

    async def find(self, name: str) -> Executor | None:
        """Return the executor of that name, which this or an earlier process started; files of a dead one are removed."""

    async def start(self, name: str, spec: WorkspaceSpec) -> Executor:
        """Start an executor that can host workspaces of that spec. Raises SandboxFailure."""

    def names(self) -> Sequence[str]:
        """Return the names of all recorded executors."""


@dataclass(frozen=True)
class Hosting:
    """Settings that all sandboxes of one kind share."""

    mode: str
    places: int
    """Concurrent workspaces in one sandbox (`Overlay`), or in all of them (`Plain`)."""
    idle_seconds: float
    environment: Mapping[str, str]
    """Environment of every command; the task's own overrides it."""
    description: Mapping[str, Any]
    provider: str

    def sandbox(self, executor: Executor, name: str = "") -> ExecutorSandbox:
        return ExecutorSandbox(
            executor.client,
            mode=self.mode,
            description=self.description,
            handle={"provider": self.provider, "executor": name},
            environment=self.environment,
            idle_seconds=self.idle_seconds,
        )


@dataclass(frozen=True)
class Placement:
    """Location of a spec's workspaces."""

    spec: WorkspaceSpec
    """Completed from its image."""
    name: str
    """Name of the executor that they share; in `Plain` each has its own."""
    hosting: Hosting
    executors: Executors


@dataclass
class _Sandbox:
    """One executor, with its leases and groups."""

    free: asyncio.Semaphore
    leases: int = 0
    groups: set[str] = field(default_factory=set)
    """Groups that will request further workspaces in it."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the executor is started or ended."""
    running: tuple[Executor, ExecutorSandbox] | None = None
    is_lost: bool = False
    failures: list[SandboxFailure] = field(default_factory=list)
    """Failures of its starts."""


class _Turns:
    """Which attempts may have workspaces now: all, or a single one that must be alone. Such an attempt starts when no other
    has a workspace, and others wait until it has ended. Only attempts without a workspace wait, so none is stuck.
    """

    def __init__(self) -> None:
        self._workspaces = Counter[str]()
        """By attempt."""
        self._alone: str | None = None
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def taken(self, attempt: str, *, alone: bool) -> AsyncIterator[None]:
        while not self._may_begin(attempt, alone=alone):
            await self._changed.wait()
        self._workspaces[attempt] += 1
        if alone:
            self._alone = attempt
        try:
            yield
        finally:
            self._workspaces[attempt] -= 1
            self._workspaces += Counter()  # drops zeros
            if self._alone == attempt and attempt not in self._workspaces:
                self._alone = None
            self._changed.set()
            self._changed = asyncio.Event()

    def _may_begin(self, attempt: str, *, alone: bool) -> bool:
        if self._alone not in (None, attempt):
            return False
        return not alone or self._workspaces.keys() <= {attempt}


class HostedProvider:
    """Base of providers that start executors themselves. Call `_open_pool` first.

    A sandbox starts with its first lease, and ends with its last one when no group needs it any more.
    """

    name: str
    shares_memory = False
    """Whether its executors are in one control group, so that a process of one may be killed for another's memory."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self.warnings: Sequence[str] = ()
        self._pool: LeasePool | None = None

    async def _placed(self, spec: WorkspaceSpec) -> Placement:
        """Return the location of its workspaces. Raises SandboxFailure."""
        raise NotImplementedError

    def _open_pool(self, hosting: Hosting, executors: Executors) -> None:
        """Set `hosting` and `executors`, which find what an earlier process left."""
        self._found = hosting, executors
        self._free = asyncio.Semaphore(hosting.places)
        self._sandboxes: dict[str, _Sandbox] = {}
        self._pool = LeasePool(self._place)

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        return await self._opened().acquire(spec, attempt=attempt, fence=fence, name=name)

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        return await self._opened().reattach(handle, spec=spec, fence=fence)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider. Executors keep running, except those of `Plain`, which have one workspace each."""
        self._opened()
        hosting, executors = self._found
        for name in executors.names():
            attempt, dot, workspace = name.partition(".")
            is_own = hosting.mode == "Plain" and bool(dot)
            if (is_own and not unwanted(attempt, workspace)) or (executor := await executors.find(name)) is None:
                continue
            if is_own:
                await executor.stop()
            else:
                sandbox = hosting.sandbox(executor)
                await sandbox.sweep(unwanted)
                await sandbox.close()

    def sandbox_states(self) -> Mapping[str, int]:
        """See SandboxReporter."""
        sandboxes = [one for one in self._sandboxes.values() if one.running or one.leases]
        return Counter("Ready" if one.running else "Starting" for one in sandboxes)

    def waits_for(self) -> str:
        """See SandboxReporter. Starts on this machine fail at once, or wait for a place, which ends by itself."""
        return ""

    async def forget_group(self, group: str) -> None:
        self._opened()
        for sandbox in list(self._sandboxes.values()):
            sandbox.groups.discard(group)
            if sandbox.running is not None:
                sandbox.leases += 1
                try:
                    await sandbox.running[1].forget_group(group)
                finally:
                    sandbox.leases -= 1
            await _end_if_unneeded(sandbox, stops=False)

    async def _release(self) -> None:
        """Close the connections; all workspaces stay."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()
            for sandbox in self._sandboxes.values():
                if sandbox.running is not None:
                    await sandbox.running[1].close()

    def _opened(self) -> LeasePool:
        if self._pool is None:
            raise SandboxFailure("ProviderUnavailable", f"the {self.name} provider is not open; await open() first")
        return self._pool

    @contextlib.asynccontextmanager
    async def _place(self, lease: Lease) -> AsyncIterator[ExecutorSandbox]:
        placement = await self._placed(lease.spec)
        lease.spec, is_plain = placement.spec, placement.hosting.mode == "Plain"
        is_own = is_plain or lease.spec.alone
        name = lease.identity if is_plain else f"{placement.name}-{lease.identity}" if is_own else placement.name
        if lease.handle is not None:
            name = lease.handle["executor"]
        free = self._free if is_plain else asyncio.Semaphore(placement.hosting.places)
        sandbox = self._sandboxes.setdefault(name, _Sandbox(free))
        if not is_own:
            sandbox.groups.add(lease.spec.group)
        async with contextlib.AsyncExitStack() as stack:
            if self.shares_memory:
                await stack.enter_async_context(self._turns.taken(lease.attempt, alone=lease.spec.alone))
            await stack.enter_async_context(_taken(sandbox.free, lease))
            sandbox.leases += 1
            tried: ExecutorSandbox | None = None
            try:
                tried = await _running(sandbox, name, placement, lease)
                yield tried
            except SandboxFailure as failure:
                # Also if it failed before the workspace was created: otherwise a group without a prepared state would
                # get the same lost sandbox in each attempt.
                has_tried = sandbox.running is not None and sandbox.running[1] is tried
                sandbox.is_lost = sandbox.is_lost or (has_tried and failure.reason == "SandboxLost")
                raise
            finally:
                # Do this before the place becomes free, because in `Plain` the next lease starts another executor.
                sandbox.leases -= 1
                if is_own:
                    self._sandboxes.pop(name, None)
                if is_own and lease.kept and sandbox.running is not None:
                    await sandbox.running[1].close()
                else:
                    await _end_if_unneeded(sandbox, stops=is_own)


async def _running(sandbox: _Sandbox, name: str, placement: Placement, lease: Lease) -> ExecutorSandbox:
    failures = len(sandbox.failures)
    async with sandbox.changing:
        if sandbox.running is None or sandbox.is_lost:
            if len(sandbox.failures) > failures:
                # A failed start also fails for the leases that waited for it.
                raise SandboxFailure(sandbox.failures[-1].reason, sandbox.failures[-1].message)
            executor = await placement.executors.find(name)
            if executor is None and lease.handle is not None:
                raise SandboxFailure("SandboxLost", f"the executor of {lease.identity} has ended; its state is lost")
            try:
                executor = executor or await placement.executors.start(name, lease.spec)
            except SandboxFailure as failure:
                sandbox.failures.append(failure)
                raise
            lost, sandbox.is_lost = sandbox.running, False
            sandbox.running = executor, placement.hosting.sandbox(executor, name)
            if lost is not None:
                await lost[1].close()
        return sandbox.running[1]


async def _end_if_unneeded(sandbox: _Sandbox, *, stops: bool) -> None:
    """End the sandbox if no lease and no group needs it. Without `stops` it must also be empty, because others may use it
    again.
    """
    async with sandbox.changing:
        if sandbox.running is None:
            return
        executor, hosted = sandbox.running
        is_unneeded = stops or (not (sandbox.leases or sandbox.groups) and await hosted.is_empty())
        if is_unneeded and not (sandbox.leases or sandbox.groups):
            sandbox.running = None
            try:
                await executor.stop()
            finally:
                await hosted.close()


@contextlib.asynccontextmanager
async def _taken(free: asyncio.Semaphore, lease: Lease) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(lease.spec.start_seconds):
            await free.acquire()
    except TimeoutError as error:
        raise no_place(lease.identity, lease.spec.start_seconds) from error
    try:
        yield
    finally:
        free.release()
