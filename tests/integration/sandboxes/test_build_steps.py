"""Steps of Dockerfiles: their limits, their network, and what they can do without root."""

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_runtime.sandboxes import base
from agent_runtime.sandboxes.base import SetupFailed
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.files import Dockerfile
from rollout_api.sandbox import Resources
from tests.integration.sandboxes.conftest import FIRST, NOBODY, python_for_nobody, spec, template
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


# By the proxy itself, because urllib asks no proxy for addresses of this machine.
FETCH = (
    """python3 -c 'import http.client, sys; proxy = http.client.HTTPConnection("127.0.0.1", 3128); """
    """proxy.request("GET", sys.argv[1]); answer = proxy.getresponse(); assert answer.status == 200, answer.read(); """
    """print(answer.read().decode())'"""
)


async def test_step_has_the_network_of_the_setup_and_never_that_of_the_agent(builds: Builds) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="said")

    server = TestServer(web.Application())
    server.app.router.add_get("/", answer)
    await server.start_server()
    try:
        reached: list[str] = [f"127.0.0.1:{server.port}"]
        fetch = f"RUN {FETCH} http://{reached[0]}/ > /fetched"
        builds.network = {"setup": reached}
        built = await builds.build(dockerfile(fetch))
        assert await builds.output_of(built, "cat", "/fetched") == "said\n"
        builds.network = {"setup": "None", "agent": reached, "verifier": reached}
        with pytest.raises(SetupFailed, match=r"line 2: RUN python3 .* ended with exit code 1"):
            await builds.build(dockerfile(fetch))
        builds.network = {"setup": reached}
        with pytest.raises(SetupFailed, match=r"line 2: RUN .* ended with exit code 1"):
            await builds.build(dockerfile(fetch.replace("RUN", "RUN --network=none")))
    finally:
        await server.close()


BUILDS_WITHOUT_ROOT = Path(__file__).with_name("building_without_root.py")


@only_root
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["RUN echo a > /a", "WORKDIR /made", "COPY --chown=3:4 a.txt ."], "built"),
        (["RUN touch /a && chown 3:4 /a"], "line 2: .*Without root, a build has one user.*Run as root"),
        (["USER 33", "RUN id"], "line 3: .*Without root, a build has one user"),
        (["RUN exit 3"], "line 2: RUN exit 3 ended with exit code 3, expected 0$"),
    ],
)
def test_step_that_needs_other_users_says_that_root_is_missing(lines: list[str], expected: str) -> None:
    python, libraries = python_for_nobody()
    folder = tempfile.mkdtemp()
    os.chown(folder, NOBODY, NOBODY)
    try:
        done = subprocess.run(
            [python, str(BUILDS_WITHOUT_ROOT), folder, *lines],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": libraries, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert re.search(expected, done.stdout.strip(), re.DOTALL), done.stdout
    finally:
        shutil.rmtree(folder)
