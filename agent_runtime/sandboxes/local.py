"""Sandboxes on this machine, without containers or a cluster.

`Overlay`: one executor a run hosts all workspaces, each a copy-on-write view of this machine's root. `Plain`: one executor
a workspace, on a temporary folder of its own; nothing but that folder keeps two attempts apart, and `warnings` says so.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.sandboxes.base import Fence, Fenced, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_sandbox import ExecutorSandbox, no_place, workspace_id
from agent_runtime.sandboxes.executor_workspace import ExecutorWorkspace
from agent_runtime.sandboxes.local_environment import (
    PythonEnvironment,
    binds,
    choose_search_path,
    masked_paths,
    people_homes,
    readable_by,
    running_environment,
)
from agent_runtime.sandboxes.local_executor import LocalExecutor
from rollout_api.sandbox import SandboxTemplate

SHARED = "shared"
# Whom commands run as in `Plain` when root started the run: its own rights would be the machine's.
PLAIN_USER = "nobody"


@dataclass(frozen=True)
class Machine:
    """What all sandboxes of a run on this machine have in common."""

    records: Path
    """Folder of the records by which the next process finds executors."""
    template: SandboxTemplate
    places: int
    """Workspaces that may live at once."""
    environment: Mapping[str, str]
    """Of every command, under the task's own."""
    description: Mapping[str, Any]

    def record(self, name: str) -> Path:
        """File of one executor's record."""
        return self.records / f"{name}.json"

    def sandbox(
        self, executor: LocalExecutor, released: Callable[[str], Awaitable[None]] | None = None
    ) -> ExecutorSandbox:
        """The sandbox of an executor of this machine."""
        return ExecutorSandbox(
            executor.client,
            mode=executor.record.mode,
            description=self.description,
            handle={"provider": LocalProvider.name},
            environment=self.environment,
            idle_seconds=self.template.idle_seconds,
            released=released,
        )


class LocalProvider:
    """Implements SandboxProvider on this machine.

    `run_dir` keeps the records by which the next process finds what runs here; `places` workspaces live at once;
    `private` are further folders that no workspace may see, such as the job's output.
    """

    name = "local"

    def __init__(self, run_dir: Path, template: SandboxTemplate, *, places: int, private: Sequence[Path] = ()) -> None:
        self.warnings: Sequence[str] = ()
        self._records = run_dir / "sandboxes"
        self._template, self._places = template, places
        self._private = (run_dir, *private)
        self._host: OverlaySandboxes | PlainSandboxes | None = None

    async def open(self) -> None:
        """Find the run's executor, or start one; that settles the mode. Raises SandboxFailure."""
        self._records.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in self._private:
            # What is not there yet cannot be masked, and would be seen once it is.
            folder.mkdir(parents=True, exist_ok=True)
        masks = masked_paths(self._private, people_homes())
        record = self._records / f"{SHARED}.json"
        start = overlay_starter(record, self._template, self._places, masks)
        executor = await LocalExecutor.find(record) or await start()
        try:
            if executor.record.mode == "Overlay":
                guarantees = (await executor.client.health())["guarantees"]
                machine = await self._machine(executor, running_environment(), masks)
                self.warnings = [*common_warnings(self._template), *overlay_warnings(guarantees)]
                self._host = OverlaySandboxes(machine, executor, start)
                return
            # It has shown that executors work here; in Plain each workspace has its own.
            python = running_environment()
            is_reachable = readable_by(python, plain_uid(self._template.user))
            machine = await self._machine(executor, python if is_reachable else None, masks=[])
            self.warnings = [
                *common_warnings(self._template),
                *plain_warnings(executor.record.mode_reason, is_reachable),
            ]
            self._host = PlainSandboxes(machine)
        finally:
            if not isinstance(self._host, OverlaySandboxes):
                await executor.stop()

    async def _machine(
        self, executor: LocalExecutor, python: PythonEnvironment | None, masks: Sequence[str]
    ) -> Machine:
        path, path_reason = await choose_search_path(python, masks, os.environ)
        return Machine(
            records=self._records,
            template=self._template,
            places=self._places,
            environment={"PATH": path},
            description={
                "provider": self.name,
                "mode": executor.record.mode,
                "modeReason": executor.record.mode_reason,
                "root": "host:/",
                "imageUsed": False,
                "path": path_reason,
            },
        )

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> ExecutorWorkspace:
        """See SandboxProvider."""
        return await self._opened().acquire(spec, attempt=attempt, fence=fence, name=name)

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        """See SandboxProvider."""
        return await self._opened().reattach(handle, spec=spec, fence=fence)

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """See SandboxProvider."""
        await self._opened().sweep(unwanted)

    async def forget_group(self, group: str) -> None:
        """See SandboxProvider."""
        await self._opened().forget_group(group)

    async def close(self, *, keep: bool = False) -> None:
        """See SandboxProvider."""
        if self._host is not None:
            await self._host.close()
            self._host = None
        if keep:
            return
        for record in self._records.glob("*.json"):
            executor = await LocalExecutor.find(record)
            if executor is not None:
                await executor.stop()

    def _opened(self) -> OverlaySandboxes | PlainSandboxes:
        if self._host is None:
            raise SandboxFailure("ProviderUnavailable", "the local provider is not open; await open() first")
        return self._host


class OverlaySandboxes:
    """All workspaces in one executor; a new one is started when it is lost."""

    def __init__(
        self, machine: Machine, executor: LocalExecutor, start: Callable[[], Awaitable[LocalExecutor]]
    ) -> None:
        self._machine, self._start = machine, start
        self._sandbox = machine.sandbox(executor)
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
                executor = await LocalExecutor.find(self._machine.record(SHARED)) or await self._start()
                await sandbox.close()
                self._sandbox = self._machine.sandbox(executor)
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

    async def close(self) -> None:
        """Close the connection."""
        await self._sandbox.close()


class PlainSandboxes:
    """An executor for each workspace, started and stopped with it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free = asyncio.Semaphore(machine.places)
        self._running: dict[str, tuple[LocalExecutor, ExecutorSandbox]] = {}

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
        for record in self._machine.records.glob("*.json"):
            attempt, dot, name = record.stem.partition(".")
            if dot and unwanted(attempt, name) and (executor := await LocalExecutor.find(record)) is not None:
                await executor.stop()

    async def forget_group(self, group: str) -> None:
        """Nothing is shared by a group here."""

    async def close(self) -> None:
        """Close all connections."""
        for _, sandbox in self._running.values():
            await sandbox.close()

    async def _found(self, identity: str, spec: WorkspaceSpec) -> ExecutorSandbox | None:
        if identity in self._running:
            return self._running[identity][1]
        executor = await LocalExecutor.find(self._machine.record(identity))
        if executor is None:
            return None
        await self._take_place(identity, spec.start_seconds)
        return self._keep(identity, executor)

    async def _started(self, identity: str, spec: WorkspaceSpec) -> ExecutorSandbox:
        uid = plain_uid(spec.user)

        def settings(home: Path) -> Mapping[str, Any]:
            root = home / "root"
            root.mkdir(mode=0o755)
            user = spec.user or (PLAIN_USER if os.geteuid() == 0 else None)
            if os.geteuid() == 0:
                os.chown(root, uid, -1)
            return {
                "mode": "Plain",
                "root": str(root),
                "user": user,
                "idleSeconds": self._machine.template.idle_seconds,
            }

        await self._take_place(identity, spec.start_seconds)
        try:
            executor = await LocalExecutor.start(
                self._machine.record(identity), settings, start_seconds=spec.start_seconds
            )
        except BaseException:
            self._free.release()
            raise
        return self._keep(identity, executor)

    def _keep(self, identity: str, executor: LocalExecutor) -> ExecutorSandbox:
        sandbox = self._machine.sandbox(executor, released=self._stop)
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


def overlay_starter(
    record: Path, template: SandboxTemplate, places: int, masks: Sequence[str]
) -> Callable[[], Awaitable[LocalExecutor]]:
    """Starts the executor of a run; one that was asked to try `Overlay` may come up in `Plain`."""

    def settings(home: Path) -> Mapping[str, Any]:
        return {
            "mode": template.workspaces.mode.value,
            "places": places,
            "masks": [*masks, str(home)],
            "binds": binds(running_environment()),
            "idleSeconds": template.idle_seconds,
        }

    return lambda: LocalExecutor.start(record, settings, start_seconds=template.start_seconds)


def plain_uid(user: str | None) -> int:
    """The uid of commands in `Plain`. Raises SandboxFailure for a user this machine does not know, or may not become."""
    if user is None:
        return pwd.getpwnam(PLAIN_USER).pw_uid if os.geteuid() == 0 else os.geteuid()
    name = user.partition(":")[0]
    try:
        uid = int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise SandboxFailure(
            "ProviderUnavailable", f"sandbox.user {name!r} is not a user of this machine; give one that is, or a uid"
        ) from error
    if os.geteuid() not in (0, uid):
        raise SandboxFailure(
            "ProviderUnavailable",
            f"sandbox.user {user!r}: in Plain mode commands run as the user of rolloutctl, uid {os.geteuid()}; leave user "
            "out, or run as root",
        )
    return uid


def common_warnings(template: SandboxTemplate) -> list[str]:
    """What the local provider keeps in no mode."""
    image = f"image {template.image}" if template.image else "the tasks' image"
    warnings = [f"{image} is not used: commands see this machine's own programs and files"]
    if template.resources.cpu is not None:
        warnings.append(f"sandbox.resources.cpu {template.resources.cpu} is not kept: commands share all cores")
    return warnings


def overlay_warnings(guarantees: Mapping[str, str]) -> list[str]:
    """What the executor says that it cannot keep here, beside cpu."""
    return [
        f"{what} is not kept: {why.removeprefix('None: ')}"
        for what, why in guarantees.items()
        if why.startswith("None") and what != "cpu"
    ]


def plain_warnings(reason: str | None, python_reachable: bool) -> list[str]:
    """What `Plain` does not isolate."""
    because = f" ({reason})" if reason else ""
    warnings = [
        f"commands run in Plain mode{because}: they see this machine's files, processes and network as their user does, "
        "and attempts are kept apart by their folders alone"
    ]
    if not python_reachable:
        warnings.append(
            f"user {PLAIN_USER} cannot read the Python environment of rolloutctl, so it is not on the commands' PATH"
        )
    return warnings
