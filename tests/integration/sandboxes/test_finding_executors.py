"""On a busy machine, an executor that misses one health check keeps its workspaces."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.base import WorkspaceSpec
from agent_runtime.sandboxes.container.executor import ContainerExecutors
from agent_runtime.sandboxes.local.executor import ExecutorRecord, LocalExecutor, LocalExecutors


class ModelRouter:
    """Breaks the first connections, and forwards the others to a real executor's socket."""

    def __init__(self, socket: str) -> None:
        self._socket, self.breaks = socket, 1

    async def serve(self, path: Path) -> asyncio.Server:
        return await asyncio.start_unix_server(self._carry, path)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.breaks:
            self.breaks -= 1
            writer.close()
            return
        from_executor, to_executor = await asyncio.open_unix_connection(self._socket)
        await asyncio.gather(_copy(reader, to_executor), _copy(from_executor, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


class Containers:
    """The container of one executor: whether it runs, and whether it was removed."""

    def __init__(self) -> None:
        self.is_running, self.is_removed = True, False

    async def start(self, container: str, spec: WorkspaceSpec, config: Mapping[str, Any], home: Path) -> str:
        raise AssertionError("nothing is started here")

    async def remove(self, container: str) -> None:
        self.is_removed = True

    async def has_ended(self, container: str) -> bool:
        return not self.is_running

    async def log(self, container: str) -> str:
        return ""


@pytest.fixture
async def executor(tmp_path: Path) -> AsyncIterator[LocalExecutor]:
    """A real executor behind a router that breaks the next connection."""

    def settings(home: Path, spec: WorkspaceSpec) -> Mapping[str, Any]:
        return {"mode": "Plain", "root": str(home)}

    executor = await LocalExecutors(tmp_path, settings, 60).start("one", WorkspaceSpec("g0", "/"))
    front = ModelRouter(executor.record.address.removeprefix("unix:"))
    async with await front.serve(tmp_path / "front"):
        record = replace(executor.record, address=f"unix:{tmp_path}/front")
        _write(tmp_path / "one.json", vars(record))
        yield LocalExecutor(record, tmp_path / "one.json")
    await executor.stop()


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(record)))


def _container_record(record: ExecutorRecord, home: Path) -> dict[str, Any]:
    return {
        "container": "rollout-one",
        "token": record.token,
        "home": str(home),
        "address": record.address,
        "boot_id": record.boot_id,
        "mode": "Plain",
        "mode_reason": None,
    }


async def test_local_executor_is_found_when_it_misses_a_health_check(executor: LocalExecutor, tmp_path: Path) -> None:
    found = await LocalExecutors(tmp_path, lambda home, spec: {}, 60).find("one")
    assert found is not None, "its workspaces and its folder are lost"
    assert Path(executor.record.home).is_dir()
    await found.client.close()


async def test_container_is_kept_when_its_executor_misses_a_health_check(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    _write(tmp_path / "one.json", _container_record(executor.record, tmp_path / "home"))
    containers = Containers()
    found = await ContainerExecutors(tmp_path, containers, lambda spec: {}).find("one")
    assert found is not None
    assert not containers.is_removed, "a live sandbox is lost to a busy machine"
    await found.client.close()


async def test_container_is_removed_when_it_has_ended(executor: LocalExecutor, tmp_path: Path) -> None:
    _write(tmp_path / "one.json", _container_record(executor.record, tmp_path / "home"))
    containers = Containers()
    containers.is_running = False
    assert await ContainerExecutors(tmp_path, containers, lambda spec: {}).find("one") is None
    assert containers.is_removed
