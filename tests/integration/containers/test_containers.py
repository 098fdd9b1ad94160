"""Sandboxes in real containers: by podman's command line, and by kodo."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.integrations.kodo import KodoProvider
from agent_runtime.sandboxes.base import Fence, SandboxFailure, SandboxProvider, SetupFailed, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.container.provider import ContainerProvider
from tests.integration.containers.conftest import IMAGE, REPOSITORY, podman, template

FIRST, SECOND = Fence(1, "first"), Fence(2, "second")
PROVIDERS: dict[str, type[ContainerProvider | KodoProvider]] = {"Container": ContainerProvider, "Kodo": KodoProvider}


def spec(**changes: Any) -> WorkspaceSpec:
    defaults = {"group": "g0", "working_dir": "/app", "image": IMAGE, "start_seconds": 60}
    return WorkspaceSpec(**{**defaults, **changes})


def made(kind: str, folder: Path, **changes: object) -> SandboxProvider:
    return PROVIDERS[kind](folder / "run", template(**changes), places=4)


async def say(workspace: Workspace, command: str, key: str) -> str:
    result = await workspace.run(command, key=key, deadline_seconds=60)
    return (result.stdout + result.stderr).decode().strip()


def containers() -> list[str]:
    return podman("ps", "--all", "--format", "{{.Names}}").split()


@pytest.fixture(params=["Container", pytest.param("Kodo", marks=pytest.mark.full)])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def provider(kind: str, tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    opened = made(kind, tmp_path)
    await opened.open()
    yield opened
    await opened.close()
    assert containers() == []


async def test_commands_run_in_the_tasks_image_and_each_attempt_has_its_own(provider: SandboxProvider) -> None:
    one, other = await asyncio.gather(
        provider.acquire(spec(setup=["echo prepared > log"]), attempt="0-1", fence=FIRST, name="agent"),
        provider.acquire(spec(setup=["echo prepared > log"]), attempt="1-1", fence=FIRST, name="agent"),
    )
    assert await say(one, "echo $GREETING $PATH; id -u; cat log; echo mine > only-here; ls /bin/cat", "1:a") == (
        "hello /bin\n1000\nprepared\n/bin/cat"
    )
    assert await say(other, "ls", "1:a") == "log"
    assert (one.description["provider"], one.description["imageUsed"]) == (provider.name, True)
    assert len(containers()) == 2
    await one.release()
    assert len(containers()) == 1


async def test_a_failed_setup_leaves_no_container(provider: SandboxProvider) -> None:
    with pytest.raises(SetupFailed, match="exit code 3"):
        await provider.acquire(spec(setup=["exit 3"]), attempt="0-1", fence=FIRST, name="agent")
    assert containers() == []


async def test_removed_container_is_lost_and_the_next_attempt_gets_another(provider: SandboxProvider) -> None:
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    await asyncio.to_thread(podman, "rm", "--force", *containers())
    with pytest.raises(SandboxFailure):
        await say(workspace, "echo on", "1:a")
    await workspace.release()
    again = await provider.acquire(spec(), attempt="0-2", fence=FIRST, name="agent")
    assert await say(again, "echo on", "1:a") == "on"


async def test_missing_image_is_named(provider: SandboxProvider) -> None:
    with pytest.raises(SandboxFailure, match="localhost/none:1"):
        await provider.acquire(spec(image="localhost/none:1"), attempt="0-1", fence=FIRST, name="agent")
    with pytest.raises(SandboxFailure, match=r"needs sandbox\.image"):
        await provider.acquire(spec(image=None), attempt="0-1", fence=FIRST, name="agent")


async def test_abandoned_sandbox_ends_with_its_container(kind: str, tmp_path: Path) -> None:
    # Longer than a busy machine takes from an executor's start to the first call to it.
    opened = made(kind, tmp_path, idleSeconds=8)
    await opened.open()
    await opened.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    await opened.close(keep=True)
    async with asyncio.timeout(60):
        while await asyncio.to_thread(containers):  # noqa: ASYNC110 (another process's)
            await asyncio.sleep(0.2)


async def test_executor_that_cannot_start_is_reported_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """It is reported at once, not after sandbox.startSeconds, which leave time for slow pulls."""
    (tmp_path / "broken/python").mkdir(parents=True)
    (tmp_path / "broken/executor").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "broken/executor").chmod(0o755)
    broken = {**os.environ, "ROLLOUT_EXECUTOR_IMAGE": str(tmp_path / "broken")}
    provider = PROVIDERS[kind](tmp_path / "run", template(), places=1, environ=broken)
    await provider.open()
    with pytest.raises(SandboxFailure, match="ended before its executor answered"):
        await provider.acquire(spec(start_seconds=3600), attempt="0-1", fence=FIRST, name="agent")
    assert containers() == []
    await provider.close()


RUNNER = """
import asyncio, json, sys
from pathlib import Path
from tests.integration.containers.test_containers import FIRST, made, spec
from tests.support import kodo_double
kodo_double.stand_in()

async def main(kind, folder):
    provider = made(kind, Path(folder))
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    command = asyncio.create_task(workspace.run("sleep 1; echo once >> count", key="1:slow", deadline_seconds=60))
    await asyncio.sleep(0.3)
    print(json.dumps(dict(workspace.handle)), flush=True)
    await command
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


def running(kind: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/operator"}
    return subprocess.Popen([sys.executable, "-c", RUNNER, kind, str(folder)], env=environment, stdout=-1, text=True)


async def test_a_killed_runner_loses_no_command_and_runs_none_twice(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as process:
        assert process.stdout is not None
        handle = json.loads(await asyncio.to_thread(process.stdout.readline))
        process.send_signal(signal.SIGKILL)
    provider = made(kind, tmp_path)
    await provider.open()
    workspace = await provider.reattach(handle, spec=spec(), fence=SECOND)
    assert await say(workspace, "sleep 1; echo once >> count", "1:slow") == ""
    assert await say(workspace, "cat count", "1:look") == "once"
    await provider.close()
    assert containers() == []


async def test_a_container_whose_runner_was_killed_while_it_started_is_removed_by_the_next(
    kind: str, tmp_path: Path
) -> None:
    with running(kind, tmp_path) as process:
        while not await asyncio.to_thread(containers):
            assert process.poll() is None
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert len(containers()) == 1
    provider = made(kind, tmp_path)
    await provider.open()
    await provider.sweep(lambda attempt, name: True)
    assert containers() == []
    await provider.close()


async def test_a_container_reaches_no_network_unless_the_task_wants_one(tmp_path: Path) -> None:
    provider = made("Container", tmp_path)
    await provider.open()
    closed = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    assert await say(closed, "ls /sys/class/net", "1:a") == "lo"
    wanted = spec(network={"agent": "Public"})
    open_one = await provider.acquire(wanted, attempt="1-1", fence=FIRST, name="agent")
    assert "eth0" in await say(open_one, "ls /sys/class/net", "1:a")
    await provider.close()


async def test_no_program_of_a_container_gains_rights_or_ends_the_executor(tmp_path: Path) -> None:
    provider = made("Container", tmp_path)
    await provider.open()
    workspace = await provider.acquire(spec(user="0"), attempt="0-1", fence=FIRST, name="agent")
    said = await say(workspace, "grep -E '^(CapBnd|NoNewPrivs)' /proc/self/status; kill -9 1; echo on", "1:a")
    bounds = dict(line.split(":\t") for line in said.split("\n")[:2])
    # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID: bits 0, 1, 3, 4, 6, 7.
    assert (int(bounds["CapBnd"], 16), bounds["NoNewPrivs"]) == (0b1101_1011, "1")
    assert said.endswith("on")
    await provider.close()


async def test_overlay_without_user_namespaces_and_path_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match=r"rootless podman.*Auto or Plain"):
        await made("Container", tmp_path, workspaces={"mode": "Overlay"}).open()
    provider = made("Container", tmp_path)
    await provider.open()
    with pytest.raises(SandboxFailure, match="--provider Local"):
        await provider.acquire(spec(image="./image.tar"), attempt="0-1", fence=FIRST, name="agent")
    await provider.close()
