"""Workspaces in sandboxes whose executors this process starts itself: on this machine, in containers, by another tool.

`Overlay`: one executor an image hosts all workspaces. `Plain`: one executor a workspace, started and stopped with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_runtime.sandboxes.base import Fence, Fenced, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client import ExecutorClient
from agent_runtime.sandboxes.executor_sandbox import ExecutorSandbox, no_place, workspace_id
from agent_runtime.sandboxes.executor_workspace import ExecutorWorkspace


class Executor(Protocol):
    """A running executor and the client that reaches it."""

    client: ExecutorClient

    @property
    def mode(self) -> str:
        """Overlay or Plain."""

    async def stop(self) -> None:
        """End it with everything that it hosts, and remove its traces. Done twice is fine."""


class Executors(Protocol):
    """Starts executors by name, so that the next process finds them."""

    async def find(self, name: str) -> Executor | None:
        """The executor of that name, which this or an earlier process started; traces of a dead one are removed."""

    async def start(self, name: str, spec: WorkspaceSpec) -> Executor:
        """Start one that can host the workspaces of that spec. Raises SandboxFailure."""

    def names(self) -> Sequence[str]:
        """Those of which there are traces."""


@dataclass(frozen=True)
class Hosting:
    """What all sandboxes of one kind have in common."""

    mode: str
    places: int
    """Workspaces that may live at once in one sandbox (`Overlay`), or in all of them (`Plain`)."""
    idle_seconds: float
    environment: Mapping[str, str]
    """Of every command, under the task's own."""
    description: Mapping[str, Any]
    provider: str

    def sandbox(self, executor: Executor, released: Callable[[str], Awaitable[None]] | None = None) -> ExecutorSandbox:
        """The sandbox of an executor."""
        return ExecutorSandbox(
            executor.client,
            mode=self.mode,
            description=self.description,
            handle={"provider": self.provider},
            environment=self.environment,
            idle_seconds=self.idle_seconds,
            released=released,
        )


class OverlaySandbox:
    """All workspaces in the executor of that name; a new one is started when it is lost."""

    def __init__(self, hosting: Hosting, executors: Executors, name: str, executor: Executor) -> None:
        self._hosting, self._executors, self._name = hosting, executors, name
        self._sandbox = hosting.sandbox(executor)
        self._executor = executor
        self._replacing = asyncio.Lock()

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        """See SandboxProvider."""
        sandbox = self._sandbox
        try:
            return await sandbox.acquire(spec, attempt=attempt, fence=fence, name=name)
        except SandboxFailure as failure:
            if failure.reason != "SandboxLost":
                raise
        async with self._replacing:
            if self._sandbox is sandbox:
                self._executor = await found_or_started(self._executors, self._name, spec)
                await sandbox.close()
                self._sandbox = self._hosting.sandbox(self._executor)
        return await self._sandbox.acquire(spec, attempt=attempt, fence=fence, name=name)

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        """See SandboxProvider."""
        return await self._sandbox.reattach(handle, spec=spec, fence=fence)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider."""
        await self._sandbox.sweep(unwanted)

    async def forget_group(self, group: str) -> None:
        """See SandboxProvider."""
        await self._sandbox.forget_group(group)

    async def is_empty(self) -> bool:
        """Whether it hosts nothing, prepared states included."""
        try:
            return not (await self._executor.client.call("GET", "/workspaces")).json()["workspaces"]
        except SandboxFailure:
            return True

    async def close(self) -> None:
        """Close the connection."""
        await self._sandbox.close()

    async def end(self) -> None:
        """Close the connection and end the executor."""
        await self.close()
        await self._executor.stop()


async def found_or_started(executors: Executors, name: str, spec: WorkspaceSpec) -> Executor:
    """The executor of that name, started when there is none."""
    return await executors.find(name) or await executors.start(name, spec)


async def sweep_executors(executors: Executors, hosting: Hosting, unwanted: Callable[[str, str], bool]) -> None:
    """Sweep each executor that an earlier process has left running (see SandboxProvider); they run on."""
    for name in executors.names():
        executor = await executors.find(name)
        if executor is not None:
            sandbox = hosting.sandbox(executor)
            await sandbox.sweep(unwanted)
            await sandbox.close()


class OverlaySandboxes:
    """One sandbox for each image, made when its first workspace is asked for, ended when no group needs it any more.

    `open(key, spec)` makes the one of an image, which `key` tells from others.
    """

    def __init__(self, open: Callable[[str, WorkspaceSpec], Coroutine[Any, Any, OverlaySandbox]]) -> None:
        self._open_one = open
        self._opening: dict[str, asyncio.Task[OverlaySandbox]] = {}
        self._groups: dict[str, set[str]] = {}
        self._under_way: dict[str, int] = {}
        self._judging = asyncio.Lock()
        """Held while it is found out whether a sandbox is needed: groups end side by side, and one of them ends it."""

    @contextlib.asynccontextmanager
    async def _in_use(self, key: str, spec: WorkspaceSpec) -> AsyncIterator[OverlaySandbox]:
        self._groups.setdefault(key, set()).add(spec.group)
        self._under_way[key] = self._under_way.get(key, 0) + 1
        try:
            yield await self._open(key, spec)
        finally:
            self._under_way[key] -= 1

    async def _open(self, key: str, spec: WorkspaceSpec) -> OverlaySandbox:
        task = self._opening.get(key)
        if task is None:
            task = self._opening[key] = asyncio.create_task(self._open_one(key, spec))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # One impatient member must not end what others wait for.
            return await asyncio.shield(task)
        except Exception:
            if self._opening.get(key) is task:
                del self._opening[key]
            raise

    async def acquire(
        self, key: str, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str
    ) -> ExecutorWorkspace:
        """See SandboxProvider."""
        async with self._in_use(key, spec) as sandbox:
            return await sandbox.acquire(spec, attempt=attempt, fence=fence, name=name)

    async def reattach(
        self, key: str, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence
    ) -> ExecutorWorkspace:
        """See SandboxProvider."""
        async with self._in_use(key, spec) as sandbox:
            return await sandbox.reattach(handle, spec=spec, fence=fence)

    async def forget_group(self, group: str) -> None:
        """See SandboxProvider. What another group's end finds empty ends as well."""
        for key, groups in list(self._groups.items()):
            groups.discard(group)
            task = self._opening.get(key)
            if task is None or not task.done() or task.exception() is not None:
                continue
            sandbox = task.result()
            self._under_way[key] += 1
            try:
                await sandbox.forget_group(group)
            finally:
                self._under_way[key] -= 1
            async with self._judging:
                is_over = self._is_idle(key, task) and await sandbox.is_empty() and self._is_idle(key, task)
                if is_over:
                    del self._opening[key]
            if is_over:
                await sandbox.end()

    def _is_idle(self, key: str, task: asyncio.Task[OverlaySandbox]) -> bool:
        return self._opening.get(key) is task and not self._groups[key] and not self._under_way[key]

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._opening.values())
        self._opening.clear()
        for task in tasks:
            task.cancel()
        for opened in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(opened, OverlaySandbox):
                await opened.close()


class PlainSandboxes:
    """An executor for each workspace, started and stopped with it."""

    def __init__(self, hosting: Hosting, executors: Executors) -> None:
        self._hosting, self._executors = hosting, executors
        self._free = asyncio.Semaphore(hosting.places)
        self._running: dict[str, tuple[Executor, ExecutorSandbox]] = {}

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        """See SandboxProvider."""
        identity = workspace_id(attempt, name)
        sandbox = await self._found(identity, spec) or await self._started(identity, spec)
        try:
            return await sandbox.acquire(spec, attempt=attempt, fence=fence, name=name)
        except Fenced:
            raise
        except BaseException:
            # What the setup left behind would meet the next try.
            await self._stop(identity)
            raise

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        """See SandboxProvider."""
        identity = handle["workspace"]
        sandbox = await self._found(identity, spec)
        if sandbox is None:
            raise SandboxFailure("SandboxLost", f"the executor of workspace {identity} has ended; its state is gone")
        return await sandbox.reattach(handle, spec=spec, fence=fence)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider."""
        for identity in self._executors.names():
            attempt, dot, name = identity.partition(".")
            if dot and unwanted(attempt, name) and (executor := await self._executors.find(identity)) is not None:
                await executor.stop()

    async def close(self) -> None:
        """Close all connections."""
        for _, sandbox in self._running.values():
            await sandbox.close()

    async def _found(self, identity: str, spec: WorkspaceSpec) -> ExecutorSandbox | None:
        if identity in self._running:
            return self._running[identity][1]
        executor = await self._executors.find(identity)
        if executor is None:
            return None
        await self._take_place(identity, spec.start_seconds)
        return self._keep(identity, executor)

    async def _started(self, identity: str, spec: WorkspaceSpec) -> ExecutorSandbox:
        await self._take_place(identity, spec.start_seconds)
        try:
            executor = await self._executors.start(identity, spec)
        except BaseException:
            self._free.release()
            raise
        return self._keep(identity, executor)

    def _keep(self, identity: str, executor: Executor) -> ExecutorSandbox:
        sandbox = self._hosting.sandbox(executor, released=self._stop)
        self._running[identity] = executor, sandbox
        return sandbox

    async def _take_place(self, identity: str, patience: float) -> None:
        try:
            await asyncio.wait_for(self._free.acquire(), patience)
        except TimeoutError as error:
            raise no_place(identity, patience) from error

    async def _stop(self, identity: str) -> None:
        executor, sandbox = self._running.pop(identity)
        await sandbox.close()
        await executor.stop()
        self._free.release()
