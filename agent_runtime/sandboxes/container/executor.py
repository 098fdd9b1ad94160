"""Executors as the first process of containers.

A record is written before its container is started, so that the next process finds the containers of a killed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.client import ExecutorClient
from agent_runtime.sandboxes.hosting import Hosting
from agent_runtime.sandboxes.images.files import ImageError
from agent_runtime.sandboxes.images.store import ImageStore
from agent_runtime.sandboxes.recorded import ExecutorRecords, RecordedProvider
from rollout_api.sandbox import SandboxTemplate

READY_POLL_SECONDS = 0.05
# Each query of an engine starts a process, so it is made less often.
ENDED_POLL_SECONDS = 2.0
LOG_TAIL_CHARACTERS = 2000
VARIABLE = "ROLLOUT_EXECUTOR_IMAGE"
IMAGE = "agent-rollouts-executor"


class Containers(Protocol):
    """Starts containers whose first process is the executor."""

    async def start(self, container: str, spec: WorkspaceSpec, config: Mapping[str, Any], home: Path) -> str:
        """Start a container; return the address of its executor, which may not listen yet. Raises SandboxFailure.

        `config` lacks the executor's address and state folder; `home` is a private folder on this machine.
        """

    async def remove(self, container: str) -> None:
        """End and remove it if it exists. Raises SandboxFailure if it may still exist."""

    async def has_ended(self, container: str) -> bool:
        """Whether the container does not exist, or no longer runs."""

    async def log(self, container: str) -> str:
        """Return the end of its executor's log, or why it is unavailable."""


@dataclass(frozen=True)
class ContainerRecord:
    """Data with which the next process finds an executor or removes its container."""

    container: str
    token: str = field(repr=False)
    home: str
    address: str | None = None
    boot_id: str | None = None
    """None until the executor has responded; the same applies to the following fields."""
    mode: str = ""
    mode_reason: str | None = None


class ContainerExecutor:
    """A running executor in a container."""

    def __init__(self, record: ContainerRecord, path: Path, containers: Containers) -> None:
        self.record, self._path, self._containers = record, path, containers
        self.mode = record.mode
        self.client = ExecutorClient(record.address or "unix:", record.token, record.boot_id)

    async def stop(self) -> None:
        await self.client.close()
        await self._containers.remove(self.record.container)
        shutil.rmtree(self.record.home, ignore_errors=True)
        self._path.unlink(missing_ok=True)


class ContainerExecutors:
    """Executors of one run, recorded in the folder `records`. `settings` returns the executor's settings for a
    workspace's spec.
    """

    def __init__(
        self, records: Path, containers: Containers, settings: Callable[[WorkspaceSpec], Mapping[str, Any]]
    ) -> None:
        self._records = ExecutorRecords(records, ContainerRecord)
        self.names = self._records.names
        self._containers, self._settings = containers, settings

    def containers(self) -> Sequence[str]:
        return [self._container(name) for name in self.names()]

    async def find(self, name: str) -> ContainerExecutor | None:
        record = self._records.read(name)
        if record is None:
            return None
        executor = ContainerExecutor(record, self._records.path(name), self._containers)
        has_ended = partial(self._containers.has_ended, record.container)
        if record.boot_id is not None and await executor.client.is_alive(has_ended):
            return executor
        await executor.stop()
        return None

    async def start(self, name: str, spec: WorkspaceSpec) -> ContainerExecutor:
        home = Path(tempfile.mkdtemp(prefix="rollout-"))
        token = secrets.token_urlsafe(32)
        record = ContainerRecord(self._container(name), token, str(home))
        path = self._records.write(name, record)
        config = {**self._settings(spec), "tokenSha256": hashlib.sha256(token.encode()).hexdigest()}
        try:
            async with asyncio.timeout(spec.start_seconds):
                address = await self._containers.start(record.container, spec, config, home)
                record = replace(record, address=address)
                health = await self._wait_until_it_answers(record)
        except BaseException as error:
            said = await self._said(record.container)
            with contextlib.suppress(SandboxFailure):
                await asyncio.shield(ContainerExecutor(record, path, self._containers).stop())
            if isinstance(error, TimeoutError):
                raise SandboxFailure(
                    "ExecutorFailed",
                    f"the executor of container {record.container} did not answer after {spec.start_seconds:g} s "
                    f"(sandbox.startSeconds): {said}",
                ) from error
            raise
        record = replace(record, boot_id=health["bootId"], mode=health["mode"], mode_reason=health.get("modeReason"))
        return ContainerExecutor(record, self._records.write(name, record), self._containers)

    async def remove_dead(self) -> None:
        """Remove containers of this run whose executors do not respond."""
        for name in self.names():
            executor = await self.find(name)
            if executor is not None:
                await executor.client.close()

    def _container(self, name: str) -> str:
        return f"rollout-{hashlib.sha256(f'{self._records.folder} {name}'.encode()).hexdigest()[:20]}"

    async def _said(self, container: str) -> str:
        with contextlib.suppress(SandboxFailure):
            return (await self._containers.log(container)).strip()[-LOG_TAIL_CHARACTERS:] or "it printed nothing"
        return "its output is unavailable"

    async def _wait_until_it_answers(self, record: ContainerRecord) -> dict[str, Any]:
        assert record.address is not None
        client = ExecutorClient(record.address, record.token)
        asked = looked = time.monotonic()

        async def pause() -> float:
            nonlocal looked
            if time.monotonic() > looked + ENDED_POLL_SECONDS:
                if await self._containers.has_ended(record.container):
                    said = await self._said(record.container)
                    raise SandboxFailure(
                        "ExecutorFailed", f"container {record.container} ended before its executor answered: {said}"
                    )
                looked = time.monotonic()
            # Poll often at first, and less often the longer it takes.
            return max(READY_POLL_SECONDS, (time.monotonic() - asked) / 20)

        try:
            return await client.first_health(pause)
        finally:
            await client.close()


def executor_bundle(store: ImageStore, environ: Mapping[str, str]) -> Path:
    """Return the executor's portable bundle: a folder with the launcher `executor`. Raises ImageError."""
    reference = environ.get(VARIABLE)
    if not reference:
        raise ImageError(
            f"{VARIABLE} is not set: it names the image {IMAGE} that is put into every container, as an archive "
            f"(`export {VARIABLE}=$(hack/images/build executor)`), or by its name in a registry"
        )
    image = store.unpack(reference)
    for layer in image.layers:
        if (layer / "executor").is_file() and (layer / "python").is_dir():
            return layer
    raise ImageError(f"{VARIABLE}={reference} is not the image {IMAGE}: there is no /executor in it")


class ContainerProviderBase(RecordedProvider):
    """Base of providers whose executors run in containers started by another program: an engine, or kodo."""

    def __init__(
        self, run_dir: Path, template: SandboxTemplate, *, places: int, base_dir: Path = Path(),
        environ: Mapping[str, str] | None = None, images: ImageStore | None = None,
    ) -> None:  # fmt: skip
        super().__init__(run_dir, template, places=places, folder=self.name, base_dir=base_dir, images=images)
        self._environ = os.environ if environ is None else environ

    async def _find_bundle(self) -> Path:
        """Return the executor's bundle. Raises SandboxFailure."""
        try:
            return await asyncio.to_thread(executor_bundle, self._images, self._environ)
        except ImageError as error:
            raise SandboxFailure("ProviderUnavailable", str(error)) from error

    def _container_hosting(self, mode: str, **of_backend: Any) -> Hosting:
        reason = None if mode == "Overlay" else "each container has one workspace"
        return self._hosting(mode, reason, root="image", imageUsed=True, **of_backend)
