"""Steps of Dockerfiles: their limits, their network, and what they can do without root."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_runtime.sandboxes import base
from agent_runtime.sandboxes.base import SetupFailed
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.files import Dockerfile
from rollout_api.sandbox import Resources
from tests.integration.sandboxes.conftest import FIRST, spec, template
from tests.support.dockerfile_trees import Builds

THIS_MACHINE = "agent-rollouts-quickstart"
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def dockerfile(*lines: str, seconds: int = 60) -> Dockerfile:
    return Dockerfile(text="\n".join(("FROM this-machine", *lines, "")), seconds=seconds)


@pytest.fixture
async def builds(tmp_path: Path) -> AsyncIterator[Builds]:
    provider = LocalProvider(tmp_path / "run", template("Overlay"), places=4)
    await provider.open()
    yield Builds(provider, tmp_path / "out", {"this-machine": THIS_MACHINE})
    await provider.close()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 300 MB on which workspaces write, made after pytest has chosen a folder for itself."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,mode=755", "tmpfs", folder], check=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


@only_root
async def test_step_that_fills_the_disk_fails_and_its_neighbour_can_write(small_disk: Path, builds: Builds) -> None:
    neighbour = await builds.provider.acquire(spec(), attempt="n-0", fence=FIRST, name="agent")
    building = asyncio.create_task(builds.build(dockerfile("RUN head -c 1G /dev/zero > /hog; sleep 100")))
    for number in range(20):
        written = await neighbour.run("head -c 1M /dev/zero > own", key=f"{number}:write", deadline_seconds=60)
        assert written.ok, written
        await asyncio.sleep(0.05)
    with pytest.raises(
        SetupFailed, match=r"line 2: RUN head .*Disk: .*as much as it leaves free.*sandbox.resources.disk"
    ):
        await building


@pytest.mark.parametrize("own", [None, "64Mi"])
async def test_step_that_writes_more_than_its_limit_names_it(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    monkeypatch.setattr(base, "BUILD_DISK", 32 << 20)
    builds.resources = Resources(disk=own)
    limit = own or "32Mi"
    fill = "for i in $(seq 100); do head -c 2M /dev/zero > /hog-$i; sleep 0.02; done; sleep 100"
    with pytest.raises(SetupFailed, match=rf"line 2: .*a build step may write {limit} .*raise sandbox.resources.disk"):
        await builds.build(dockerfile(f"RUN {fill}"))
    with pytest.raises(
        SetupFailed, match=rf"line 2: (?s:.*)\nA file is larger than allowed: a build step may write {limit} "
    ):
        await builds.build(dockerfile("RUN head -c 100M /dev/zero > /hog"))


async def test_step_that_forks_without_end_names_the_limit_of_processes(builds: Builds) -> None:
    builds.resources = Resources(processes=60, memory="1Mi")
    started = "RUN for i in $(seq 100); do sleep 30 & done; wait"
    with pytest.raises(
        SetupFailed, match=r"line 2: (?s:.*)\nA build step may have 60 processes .*sandbox.resources.processes"
    ):
        await builds.build(dockerfile(started))
    await builds.build(dockerfile("RUN for i in $(seq 20); do sleep 1 & done; wait"))
