"""Workspaces on this machine see an image exactly as the tool that built it does."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.base import Fence, Fenced, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from agent_runtime.sandboxes.images.store import ImageStore
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.sandbox import SandboxTemplate
from tests.integration.oci.conftest import Buildah

REPOSITORY = Path(__file__).parents[3]
ROLLOUTCTL = str(Path(sys.executable).parent / "rolloutctl")
FENCE = Fence(1, "test")
# cap_net_raw=ep, as linux/capability.h has it (version 2).
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
# All visible properties of a tree except inode numbers and the link counts of folders.
DESCRIBE = """
import hashlib, json, os, stat, sys
os.chdir(sys.argv[1])
found, links = {}, {}
for folder, folders, files in os.walk("."):
    for name in [*folders, *files, "."]:
        path = os.path.normpath(os.path.join(folder, name))
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        same = links.setdefault(info.st_ino, path) if kind == stat.S_IFREG else path
        found[path] = [info.st_mode, info.st_uid, info.st_gid, int(info.st_mtime), same]
        if kind == stat.S_IFLNK:
            found[path].append(os.readlink(path))
        elif kind != stat.S_IFIFO:
            found[path] += [(name, os.getxattr(path, name).hex()) for name in sorted(os.listxattr(path))]
        if kind == stat.S_IFREG:
            found[path].append(hashlib.sha256(open(path, "rb").read()).hexdigest())
print(json.dumps(found, sort_keys=True))
"""
SEEN = ["srv", "etc/apt", "usr/bin", "var/lib"]


def first(root: Path) -> None:
    tree = root / "srv"
    for name in ("kept", "replaced", "removed/deep", "emptied/old", "becomes-file/x", "moved"):
        (tree / name).mkdir(parents=True)
    for name in ("kept/a", "removed/deep/a", "emptied/old/a", "becomes-file/x/a", "becomes-folder", "moved/a", "plain"):
        (tree / name).write_text(name)
    os.chown(tree / "kept", 1234, 4321)
    os.chown(tree / "kept/a", 65533, 7)
    (tree / "kept").chmod(0o2775)
    (tree / "replaced").chmod(0o1777)
    os.link(tree / "kept/a", tree / "same")
    (tree / "absolute").symlink_to("/etc/passwd")
    (tree / "dangling").symlink_to("../nowhere")
    os.lchown(tree / "dangling", 5, 6)
    os.mkfifo(tree / "pipe", 0o640)
    shutil.copy("/bin/true", tree / "program")
    os.chown(tree / "program", 33, 33)
    (tree / "program").chmod(0o6755)
    os.setxattr(tree / "plain", "user.note", b"\xff\x00binary")
    shutil.copy("/bin/true", tree / "capable")
    os.setxattr(tree / "capable", "security.capability", CAPABILITY)
    os.mknod(tree / "device", 0o666 | 0o020000, os.makedev(1, 3))
    (tree / "unread").write_text("x")
    (tree / "unread").chmod(0)


def second(root: Path) -> None:
    tree = root / "srv"
    (tree / "device").unlink()
    shutil.rmtree(tree / "removed")
    shutil.rmtree(tree / "emptied")
    (tree / "emptied/new").mkdir(parents=True)
    (tree / "emptied/new/b").write_text("new")
    shutil.rmtree(tree / "becomes-file")
    (tree / "becomes-file").write_text("a file now")
    (tree / "becomes-folder").unlink()
    (tree / "becomes-folder").mkdir()
    shutil.move(tree / "moved", tree / "elsewhere")
    (tree / "plain").unlink()


def third(root: Path) -> None:
    tree = root / "srv"
    (tree / "kept").chmod(0o700)
    (tree / "elsewhere/late").write_text("late")
    (tree / "removed").mkdir()
    (root / "app").mkdir()
    os.chown(root / "app", 1000, 1000)


def describe(folder: Path) -> Any:
    done = subprocess.run([sys.executable, "-c", DESCRIBE, str(folder)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@asynccontextmanager
async def workspace(image: str, folder: Path, store: ImageStore, **changes: Any) -> AsyncIterator[ExecutorWorkspace]:
    template = SandboxTemplate.model_validate({"image": image, "workspaces": {"mode": "Overlay"}, "idleSeconds": 60})
    provider = LocalProvider(folder / "run", template, places=2, images=store)
    await provider.open()
    try:
        spec = WorkspaceSpec(**{"group": "g0", "working_dir": "/workspace", "image": image, **changes})
        yield await provider.acquire(spec, attempt="0-1", fence=FENCE, name="agent")
    finally:
        await provider.close()


async def output(place: ExecutorWorkspace, *command: str, user: str | None = None) -> str:
    result = await place.run(command, key=f"1:{hash(command)}", deadline_seconds=60, tail_bytes=1 << 20, user=user)
    assert result.ok, result.stderr.decode()
    return result.stdout.decode()


@pytest.fixture(scope="session")
def image(buildah: Buildah, debian: str) -> str:
    made = buildah.layer(buildah.layer(debian, first), second)
    config = ["--env", "GREETING=hello world", "--user", "1000:1000", "--workingdir", "/app"]
    return buildah.layer(made, third, *config)


@pytest.fixture(scope="session")
def archive(buildah: Buildah, image: str) -> Path:
    return buildah.archive(image, buildah.folder / "image.tar")


@pytest.mark.parametrize("form", ["oci-archive", "docker-archive"])
async def test_a_workspace_has_the_same_files_as_the_builders_container(
    buildah: Buildah, image: str, form: str, tmp_path: Path, store: ImageStore
) -> None:
    place = buildah.archive(image, tmp_path / "image", form)
    container = buildah("from", "--pull-never", image)
    root = Path(buildah("mount", container))
    async with workspace(str(place), tmp_path, store) as inside:
        for folder in SEEN:
            described = await asyncio.to_thread(describe, root / folder)
            seen = json.loads(await output(inside, "python3", "-c", DESCRIBE, f"/{folder}", user="0"))
            assert seen == described
    buildah("rm", container)


async def test_the_images_environment_user_and_folder_are_the_commands(
    archive: Path, tmp_path: Path, store: ImageStore
) -> None:
    place = archive
    async with workspace(f"oci-archive:{place}", tmp_path, store, working_dir_of_image=True) as inside:
        said = await output(inside, "sh", "-c", "echo $GREETING; id -u; pwd; touch made; stat -c %u made")
        assert said.split("\n") == ["hello world", "1000", "/app", "1000", ""]
        assert (inside.description["imageUsed"], inside.working_dir) == (True, "/app")
    async with workspace(
        f"oci-archive:{place}", tmp_path, store, working_dir="/tmp/mine", user="0", env={"GREETING": "x"}
    ) as inside:
        assert await output(inside, "sh", "-c", "echo $GREETING; id -u; pwd") == "x\n0\n/tmp/mine\n"


async def test_files_written_by_a_workspace_never_reach_the_image(
    archive: Path, tmp_path: Path, store: ImageStore
) -> None:
    place = str(archive)
    async with workspace(place, tmp_path, store, user="0") as inside:
        await output(inside, "sh", "-c", "rm -r /srv/kept /usr/bin/id; echo changed > /etc/passwd")
    async with workspace(place, tmp_path, store, user="0") as inside:
        assert "root:x:0:0" in await output(
            inside, "sh", "-c", "id >/dev/null; ls /srv/kept/a >/dev/null; cat /etc/passwd"
        )


async def test_a_plain_folder_is_a_root_file_system(tmp_path: Path, store: ImageStore) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/name").write_text("mine")
    async with workspace("./root", tmp_path, replace(store, base_dir=tmp_path)) as inside:
        assert await inside.read("/etc/name") == b"mine"
        await inside.write("/etc/name", b"changed", key="1:a")
    assert sorted(path.name for path in tmp_path.glob("root/**/*")) == ["etc", "name"]
    assert (tmp_path / "root/etc/name").read_text() == "mine"


async def test_the_executor_of_an_image_ends_with_its_last_group(
    archive: Path, tmp_path: Path, store: ImageStore
) -> None:
    """A thousand tasks may have a thousand images."""
    place = str(archive)
    template = SandboxTemplate.model_validate({"workspaces": {"mode": "Overlay"}, "idleSeconds": 60})
    provider = LocalProvider(tmp_path / "run", template, places=2, images=store)
    await provider.open()

    def executors() -> list[str]:
        return sorted(path.name.partition("-")[0] for path in (tmp_path / "run/sandboxes").glob("image-*.json"))

    spec = WorkspaceSpec(group="g0", working_dir="/tmp/w", image=place)
    one = await provider.acquire(spec, attempt="0-1", fence=FENCE, name="agent")
    other = WorkspaceSpec(group="g1", working_dir="/tmp/w", image=place)
    two = await provider.acquire(other, attempt="1-1", fence=FENCE, name="agent")
    await provider.forget_group("g0")
    await one.release()
    assert await output(two, "echo", "on") == "on\n"
    await two.release()
    await provider.forget_group("g1")
    assert executors() == []
    again = await provider.acquire(spec, attempt="0-2", fence=FENCE, name="agent")
    assert await output(again, "echo", "on") == "on\n"
    handle = again.handle
    await provider.close(keep=True)
    await provider.open()
    found = await provider.reattach(handle, spec=spec, fence=Fence(2, "next"))
    assert await output(found, "echo", "on") == "on\n"
    await provider.sweep(lambda attempt, name: attempt == "0-2")
    with pytest.raises((SandboxFailure, Fenced)):
        await found.run("echo on", key="2:a", deadline_seconds=9)
    await provider.close()
    assert executors() == []


async def test_unavailable_image_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: ImageStore
) -> None:
    with pytest.raises(SandboxFailure, match=r"/nowhere\.tar does not exist"):
        async with workspace("/nowhere.tar", tmp_path, store):
            pass
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(SandboxFailure, match="skopeo") as failure:
        async with workspace("registry.invalid/x:1", tmp_path, store):
            pass
    assert failure.value.reason == "ImageUnavailable"


JOB = """
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {name: in-an-image}
spec:
  tasks:
    inline:
      - name: where
        prompt: Say where you are.
        verifier:
          commands: ['grep -q Debian os-release && test "$GREETING $(id -u) $PWD" = "hello world 1000 /app"']
  model:
    scripted:
      tasks:
        - task: where
          members:
            - turns:
                - toolCalls: [{name: bash, arguments: {command: "cp /etc/os-release . && echo $GREETING"}}]
                - toolCalls: [{name: finish, arguments: {message: ok}}]
  mode: Eval
  groupSize: 1
  agent: {type: ToolCalling, tools: [bash, finish]}
  sandbox: {image: ./image.tar, workspaces: {mode: Overlay}}
  output: {uri: ./out}
"""


def test_rolloutctl_runs_a_job_in_an_image_without_docker(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "image.tar").symlink_to(archive)
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [ROLLOUTCTL, "run", "job.yaml"], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob("out/*/results.jsonl")
    assert json.loads(found.read_text())["reward"] == 1
    assert "is not used" not in done.stdout + done.stderr
