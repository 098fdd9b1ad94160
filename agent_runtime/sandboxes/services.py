"""Starts the services of a workspace in the order of their dependencies, and waits until they are ready.

The keys of its steps depend only on the services, so the next runner continues a start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent_runtime.sandboxes.base import (
    FileError,
    LiveProcesses,
    ProcessStatus,
    SandboxFailure,
    Service,
    Workspace,
    WorkspaceLimit,
)
from agent_runtime.sandboxes.prepare import LAST_CHARACTERS, LAST_LINES, LIFECYCLE_TURN
from rollout_api.services import HealthCheck, ServiceState

# Pause between two tries of a health check: databases are ready within a second.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
_PROCESS_KEY = f"{LIFECYCLE_TURN}:service"


class ServiceFailed(SandboxFailure):
    """A service has ended or did not become ready, so the agent cannot start."""

    def __init__(self, service: str, message: str) -> None:
        super().__init__("ServiceFailed", f"service {service!r} {message}")


def services_unsupported(description: Mapping[str, Any]) -> SandboxFailure:
    """Return the failure of a task with services in a sandbox in `Plain`."""
    reason = description.get("modeReason") or "sandbox.workspaces.mode is Plain"
    return SandboxFailure(
        "ServicesUnsupported", f"services need workspaces in Overlay mode, and here they are Plain: {reason}"
    )


class ServiceWorkspace(Workspace, LiveProcesses, Protocol):
    """A workspace in which a service can run."""


def host_names(services: Sequence[Service]) -> list[str]:
    """Return the names in the network of a task: those that compose files give to the agent's own, and its services'."""
    return ["client", "main", *(name for service in services for name in (service.name, *service.aliases))]


def hosts_file(services: Sequence[Service]) -> bytes:
    """Return the content of /etc/hosts by which all services of a task are found: they have one network."""
    return f"127.0.0.1 localhost workspace {' '.join(host_names(services))}\n::1 localhost\n".encode()


def without_proxy(services: Sequence[Service]) -> dict[str, str]:
    """Return variables by which programs reach services directly when the network allows others through a proxy."""
    names = ",".join(["localhost", "127.0.0.1", "::1", *host_names(services)])
    return {"NO_PROXY": names, "no_proxy": names} if services else {}


async def start_services(services: Sequence[tuple[Service, ServiceWorkspace]], *, completion_seconds: float) -> None:
    """Start all services; return when each is ready. Raises ServiceFailed, SandboxFailure.

    `completion_seconds` limits the time of a service that must complete.
    """
    completing = {
        name for service, _ in services for name, state in service.depends_on.items() if state is ServiceState.COMPLETED
    }
    starts = {
        service.name: _Start(service, workspace, completion_seconds, completes=service.name in completing)
        for service, workspace in services
    }
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts.values():
                group.create_task(start.run({name: starts[name] for name in start.service.depends_on}))
    except BaseExceptionGroup as failures:
        # The first failure cancelled the other starts.
        raise failures.exceptions[0] from None
    for start in starts.values():
        await start.check()


class _Start:
    """The start of one service. Others wait for its states."""

    def __init__(
        self, service: Service, workspace: ServiceWorkspace, completion_seconds: float, *, completes: bool
    ) -> None:
        self.service, self._workspace, self._completion_seconds = service, workspace, completion_seconds
        self._started = asyncio.Event()
        self._ready = asyncio.Event()
        self._process = ""
        # Then its work is part of the restored state, and must not be done twice.
        self._was_completed = (service.completes or completes) and service.workspace.start is not None

    async def run(self, needed: Mapping[str, _Start]) -> None:
        """Start the service when the others are in the needed states; return when it is ready."""
        try:
            await self._run(needed)
        except WorkspaceLimit as limit:
            # No agent has worked yet.
            raise self._failed(f"used up the task's resources before it was ready: {limit}") from limit

    async def _run(self, needed: Mapping[str, _Start]) -> None:
        await asyncio.gather(*(start.reach(self.service.depends_on[name]) for name, start in needed.items()))
        if self._was_completed:
            self._started.set()
            self._ready.set()
            return
        argv = self.service.argv
        if not argv:
            raise self._failed("has no command; give it one, or a Dockerfile with CMD or ENTRYPOINT")
        try:
            self._process = await self._workspace.start_process(argv[0] if len(argv) == 1 else argv, key=_PROCESS_KEY)
        except FileError as error:
            raise self._failed(f"cannot be started: {error}") from error
        self._started.set()
        health = self._health
        if health is not None:
            await self._until_healthy(health)
        self._ready.set()
        if self.service.completes:
            await self._until_completed()

    async def reach(self, state: ServiceState) -> None:
        """Wait until the service is in that state."""
        await self._started.wait()
        if state is ServiceState.HEALTHY:
            if self._health is None:
                raise self._failed("has no health check, but another service waits until it is Healthy")
            await self._ready.wait()
        elif state is ServiceState.COMPLETED:
            await self._until_completed()

    async def check(self) -> None:
        """Raise ServiceFailed if it has ended with another exit code than 0."""
        if self._was_completed:
            return
        status = await self._status()
        if status is not None and not status.running and status.exit_code != 0:
            raise self._failed(f"ended {_ending(status)}{await self._last_lines(status)}")

    async def _until_completed(self) -> None:
        if self._was_completed:
            return
        pause = FIRST_PAUSE_SECONDS
        while (status := await self._status()) is not None and status.running:
            if status.seconds > self._completion_seconds:
                lines = await self._last_lines(status)
                raise self._failed(
                    f"did not end within {self._completion_seconds:g} s (timeouts.setupSeconds), but the agent or another "
                    f"service waits until it has completed{lines}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        await self.check()

    @property
    def _health(self) -> HealthCheck | None:
        return self.service.health or self.service.workspace.health

    async def _until_healthy(self, health: HealthCheck) -> None:
        pause, number, since = FIRST_PAUSE_SECONDS, 0, 0.0
        while True:
            result = await self._workspace.run(
                health.command,
                key=f"{LIFECYCLE_TURN}:health-{number}",
                deadline_seconds=min(health.timeout_seconds, health.seconds),
            )
            if result.ok:
                return
            status = await self._status()
            if status is not None and not status.running:
                raise self._failed(f"ended {_ending(status)} before it was ready{await self._last_lines(status)}")
            # Its own time leaves out pauses, in which other workspaces have the sandbox's memory. The time without a
            # runner does not count: other services may have been missing.
            since = since or (0.0 if status is None else status.seconds)
            if status is None or status.seconds > since + health.seconds:
                told = f"; its health check ends with {result.ending}: {result.end_of_output}"
                lines = "" if status is None else await self._last_lines(status)
                raise self._failed(f"was not ready after {health.seconds} s{told}{lines}")
            number += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _status(self) -> ProcessStatus | None:
        return await self._workspace.process(self._process)

    async def _last_lines(self, status: ProcessStatus) -> str:
        """Return the end of what it printed, for a message."""
        output = b""
        with contextlib.suppress(FileError, SandboxFailure, WorkspaceLimit):
            start = max(0, status.output_bytes - LAST_CHARACTERS)
            output = (await self._workspace.read_output(self._process, start, wait_seconds=0)).data
        lines = (output + status.stderr).decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        text = "\n".join(lines)[-LAST_CHARACTERS:]
        return f"\n{text}" if text else ""

    def _failed(self, message: str) -> ServiceFailed:
        return ServiceFailed(self.service.name, message)


def _ending(status: ProcessStatus) -> str:
    return "by a signal" if status.exit_code is None else f"with exit code {status.exit_code}"
