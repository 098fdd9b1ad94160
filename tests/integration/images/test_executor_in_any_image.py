"""The bundle has everything that it needs: it starts as PID 1 of any Linux image, and commands see only that image."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.base import Fence, FileError
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold
from tests.support.full import MODES_ONCE

TOKEN = "a token that only the test knows"
ROOTS = ["debian_hello", "busybox", "musl", "scratch"]
WITH_SHELL = {"debian_hello", "busybox"}
# What DESIGN allows for the folder that every sandbox pod mounts, or copies.
LARGEST_BUNDLE_BYTES = 35_000_000
# Writes its file from a constructor: a process that loads it has loaded a library of the image.
LEAVES_A_TRACE = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) { FILE *f = fopen("/trace", "a"); if (f) fclose(f); }
"""


class Caller:
    """One attempt with one workspace."""

    def __init__(self, client: ExecutorClient, name: str) -> None:
        self.client, self.hold, self.workspace = client, Hold(name, Fence(1, "test")), f"/workspaces/{name}"
        self._calls = 0

    async def open(self) -> None:
        await self.client.call("PUT", f"/attempts/{self.hold.attempt}/fence", json_body={"epoch": 1, "holder": "test"})
        name = self.workspace.rpartition("/")[2]
        await self.change("POST", "/workspaces", json_body={"id": name, "workingDir": "/work"})

    async def change(self, method: str, path: str, **arguments: Any) -> Any:
        self._calls += 1
        return await self.client.call(method, path, hold=self.hold, key=f"0:{self._calls}", **arguments)

    async def run(self, command: str | list[str]) -> tuple[int | None, str]:
        """Run a command; return its exit code and output."""
        self._calls += 1
        how: dict[str, Any] = {
            "cwd": None,
            "user": None,
            "env": {},
            "stdin": b"",
            "head_bytes": 32_768,
            "tail_bytes": 0,
        }
        name = self.workspace.rpartition("/")[2]
        ended = await self.client.run(self.hold, name, f"0:{self._calls}", command, deadline_seconds=20, **how)
        return ended.exit_code, ended.stdout.decode()

    async def read(self, what: str, path: str) -> bytes:
        return (await self.client.call("GET", f"{self.workspace}/{what}", query=[("path", path)])).body

    async def write(self, what: str, path: str, body: bytes) -> None:
        await self.change("PUT", f"{self.workspace}/{what}", query=[("path", path)], body=body)


async def open_caller(address: str, name: str) -> AsyncIterator[Caller]:
    client = ExecutorClient(address, TOKEN)
    try:
        caller = Caller(client, name)
        await caller.open()
        yield caller
    finally:
        await client.close()


def test_the_bundle_is_small_enough_for_every_pod_to_copy(bundle: Path) -> None:
    assert sum(path.lstat().st_size for path in bundle.rglob("*") if not path.is_dir()) < LARGEST_BUNDLE_BYTES


def test_any_user_may_run_the_bundle_and_none_may_change_it(bundle: Path) -> None:
    for path in bundle.rglob("*"):
        mode = path.stat().st_mode
        assert mode & 0o444 == 0o444, path
        assert not mode & 0o022, path
        if path.is_dir() or path.name in ("executor", "python3", "loader"):
            assert mode & 0o111 == 0o111, path


def test_the_launcher_needs_no_libc(bundle: Path) -> None:
    headers = subprocess.run(
        ["readelf", "-l", bundle / "executor"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert "interpreter" not in headers


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
@pytest.mark.parametrize("root_name", ROOTS)
async def test_a_workspace_works_in_any_image(
    root_name: str, mode: str, run_container: Any, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue(root_name)
    async with run_container(root, mode, OF_THE_IMAGE="variable") as container:
        async for caller in open_caller(container.address, f"{root_name}-{mode}"):
            health = await caller.client.health()
            assert health["mode"] == mode, health["modeReason"]

            assert await caller.run(["/hello", "you"]) == (3, "hello you variable\n")

            await files_work(caller)
            if root_name in WITH_SHELL:
                _, said = await caller.run("cd /work && cat a/b.txt && ls a | wc -l")
                assert said.split() == ["text", "2"]
            else:
                with pytest.raises(FileError, match="/bin/sh"):
                    await caller.run("true")
            if mode == "Overlay":
                await forks_work(caller)
    # An overlay leaves the image as it was.
    assert (root / "work").exists() == (mode == "Plain")
    shutil.rmtree(root / "work", ignore_errors=True)


async def files_work(caller: Caller) -> None:
    """Check that files are written, read, listed and packed without programs of the image."""
    await caller.write("files", "/work/a/b.txt", b"text\n")
    assert await caller.read("files", "/work/a/b.txt") == b"text\n"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("c.txt")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"tar"))
    await caller.write("tar", "/work/a", packed.getvalue())
    with tarfile.open(fileobj=io.BytesIO(await caller.read("tar", "/work/a"))) as tar:
        assert {name.removeprefix("./") for name in tar.getnames()} >= {"b.txt", "c.txt"}
    assert json.loads(await caller.read("stat", "/work/a/c.txt"))["size"] == 3
    assert len(json.loads(await caller.read("list", "/work/a"))["entries"]) == 2


async def forks_work(caller: Caller) -> None:
    """Check that a fork of a prepared workspace has its files."""
    await caller.change("POST", f"{caller.workspace}/freeze")
    parent = caller.workspace.rpartition("/")[2]
    await caller.change("POST", "/workspaces", json_body={"id": "fork", "parent": parent})
    caller.workspace = "/workspaces/fork"
    assert await caller.read("files", "/work/a/b.txt") == b"text\n"
    assert (await caller.run(["/hello", "fork"]))[0] == 3


@pytest.mark.parametrize("mode", MODES_ONCE)
async def test_an_images_environment_is_for_its_commands_alone(
    mode: str, run_container: Any, debian_hello: Path, compile_library: Any
) -> None:
    """LD_PRELOAD, ld.so.preload, PYTHONPATH and the like of an image would otherwise run its code as the executor."""
    root = debian_hello
    compile_library(LEAVES_A_TRACE, root / "opt/trace.so")
    (root / "opt/python").mkdir(exist_ok=True)
    for module in ("json", "encodings", "sitecustomize"):
        (root / f"opt/python/{module}.py").write_text("open('/trace', 'a')")
    preload = root / "etc/ld.so.preload"
    preload.write_text("/opt/trace.so\n")
    variables = {
        "LD_PRELOAD": "/opt/trace.so",
        "LD_LIBRARY_PATH": "/opt",
        "PYTHONPATH": "/opt/python",
        "PYTHONHOME": "/opt/python",
        "PATH": "/opt/bin:/usr/bin",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    trace = root / "trace"
    try:
        async with run_container(root, mode, **variables) as container:
            async for caller in open_caller(container.address, f"environment-{mode}"):
                # chroot, a program of this machine, loads what it is told to; it ends where the launcher starts.
                trace.unlink(missing_ok=True)
                await files_work(caller)
                assert not trace.exists()
                _, seen = await caller.run(["/usr/bin/env"])
                assert set(seen.splitlines()) >= {
                    f"{name}={value}" for name, value in variables.items() if name != "KUBERNETES_SERVICE_HOST"
                }
                assert "KUBERNETES" not in seen
                # The executor's configuration must not be visible, although its processes are forks with its command
                # line.
                _, listed = await caller.run("cat /proc/[0-9]*/cmdline")
                assert "tokenSha256" not in listed
                assert "KUBERNETES" not in listed
                with pytest.raises(FileError, match="/opt/bin:/usr/bin"):
                    await caller.run(["no-such-program"])
    finally:
        for path in (preload, trace, root / "opt/trace.so"):
            path.unlink(missing_ok=True)
        shutil.rmtree(root / "work", ignore_errors=True)


def test_an_init_container_of_any_user_copies_the_bundle(bundle: Path, workshop: Path, run_bundle: Any) -> None:
    copy = workshop / "copied"
    copy.mkdir(mode=0o777)
    copy.chmod(0o777)
    as_nobody = run_bundle(copy, "--copy-to", "/copied")
    assert as_nobody.returncode == 0, as_nobody.stderr
    listed = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (bundle, copy)]
    assert listed[0] == listed[1]
    usage = subprocess.run([copy / "executor", "--config-json", "{}"], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "listen" in usage.stderr


def test_failed_copy_gives_its_reason(workshop: Path, run_bundle: Any) -> None:
    locked = workshop / "locked"
    locked.mkdir(mode=0o755, exist_ok=True)
    refused = run_bundle(locked, "--copy-to", "/copied")
    assert refused.returncode == 2
    assert "Permission denied" in refused.stderr


def test_bundle_that_cannot_be_executed_names_noexec(bundle: Path, tmp_path: Path) -> None:
    """The launcher is alone, as if the other files could not be executed."""
    subprocess.run(["cp", bundle / "executor", tmp_path], check=True)
    started = subprocess.run([tmp_path / "executor", "--config", "-"], capture_output=True, text=True, check=False)
    assert started.returncode == 2
    assert "noexec" in started.stderr
