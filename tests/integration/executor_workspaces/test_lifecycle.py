"""Nothing remains after an executor, however it ends; and what works without root."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.executor.host import FileFailure, WorkspaceFailure, WorkspaceSpec
from agent_runtime.executor.overlay import HostFailure, open_host
from agent_runtime.executor.overlay.config import Bind, HostConfig
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import (
    PATIENCE,
    Inside,
    assert_no_layer_is_left_over,
    keepers_children,
    run,
    start,
)

_PYTHON = "/usr/bin/python3"
_SCENARIO = str(Path(__file__).with_name("scenario.py"))
_NOBODY = 65534


@pytest.fixture(params=["root", "nobody"])
def user(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def state(user: str) -> Iterator[str]:
    """Create a state folder of that user, which workspaces can see like all folders of the machine."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if user == "nobody":
            os.chown(folder, _NOBODY, _NOBODY)
        else:
            os.chmod(folder, 0o755)
        yield folder


def _command(user: str, *arguments: str) -> list[str]:
    become = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"] if user == "nobody" else []
    return [*become, _PYTHON, _SCENARIO, *arguments]


def _sleepers() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if arguments.startswith((b"sleep\x003001", b"sleep\x003002")):
            found.append(pid)
    return found


def _await_sleepers(count: int) -> None:
    deadline = time.monotonic() + 20
    while len(_sleepers()) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(_sleepers()) == count


def _live(user: str, *arguments: str) -> Any:
    done = subprocess.run(_command(user, *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_closed_host_leaves_no_process_no_layer_and_no_mount(user: str, state: str) -> None:
    seen = _live(user, "Overlay", state)
    assert seen["mode"] == "Overlay", seen
    assert seen["left"] == []
    assert _sleepers() == []
    assert state not in Path("/proc/mounts").read_text()


def test_overlay_works_for_root_and_partly_for_other_users(user: str, state: str) -> None:
    seen = _live(user, "Overlay", state)
    uid, first, outside, _count = seen["id"].split()
    assert (uid, first) == ("0", "0")
    assert outside != "0" if user == "root" else outside == "0"  # nobody is root of the executor's own namespace only
    assert seen["wrote"] == "0\n"
    assert seen["fork"] == "x\n0\n" if user == "root" else seen["fork"].startswith("x\n")
    if user == "root":
        assert seen["host files"] == "0\n0\nshm\n"
        assert seen["other user"] == "1234\n"
    else:
        assert seen["host files"] == "65534\n0\nshm\n"
        assert "cannot run as user '1234'" in seen["other user"]


def test_plain_works_for_every_user(user: str, state: str) -> None:
    os.chmod(state, 0o777)
    seen = _live(user, "Plain", state)
    assert seen["mode"] == "Plain"
    assert seen["id"].split()[0] == str(_NOBODY)  # never the machine's root unless requested
    assert seen["wrote"] == "0\n"
    assert _sleepers() == []


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
def test_killed_executor_leaves_no_process_and_the_next_one_cleans_up(user: str, state: str, mode: str) -> None:
    os.chmod(state, 0o777)
    with subprocess.Popen(_command(user, mode, state, "hold"), stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout is not None
        try:
            seen = json.loads(executor.stdout.readline())
            _await_sleepers(2)
            refused = _live(user, mode, state)
        finally:
            executor.kill()
    assert "in use by another executor" in refused["failure"]
    _await_sleepers(0)
    again = _live(user, mode, state)
    for _ in range(100):  # on a busy machine the kernel may take a while to end its other processes
        if "in use by another executor" not in again.get("failure", ""):
            break
        time.sleep(0.1)
        again = _live(user, mode, state)
    assert again.get("mode") == mode, (seen, again)
    assert again["left"] == []


async def test_a_create_that_fails_halfway_leaves_nothing(overlay: Inside, tmp_path: Path) -> None:
    def others() -> list[str]:
        return sorted(name for name in os.listdir(tmp_path / "layers") if not set(name) <= set(string.hexdigits))

    before = others(), len(os.listdir("/proc/self/fd"))
    frozen = await overlay.make()
    # The mount point of /proc is gone below a frozen layer only if somebody has broken the layer from outside.
    await frozen.freeze()
    layer = next(name for name in os.listdir(tmp_path / "layers") if name.isdigit())
    (tmp_path / "layers" / layer / "u0").rename(tmp_path / "layers" / layer / "moved")
    with pytest.raises(WorkspaceFailure, match="cannot be created"):
        await overlay.make(parent=frozen.spec.id)
    (tmp_path / "layers" / layer / "moved").rename(tmp_path / "layers" / layer / "u0")
    assert (await run(await overlay.make(parent=frozen.spec.id), "echo fine")).output == "fine\n"
    for workspace in list(overlay.host._live):
        await workspace.destroy()
    await assert_no_layer_is_left_over(overlay.host)
    assert (others(), len(os.listdir("/proc/self/fd"))) == before


async def test_workspace_whose_init_died_reports_it(overlay: Inside) -> None:
    workspace = await overlay.make()
    command, output = await start(workspace, ["sleep", "1000"])
    os.kill(_init_of(workspace), 9)
    failure = await asyncio.wait_for(workspace.failed, 20)
    assert failure.cause == "WorkspaceEnded"
    assert (await command.exited).cause == "WorkspaceEnded"
    os.close(output)
    with pytest.raises(WorkspaceFailure, match="has ended"):
        await run(workspace, "true")
    await workspace.destroy()
    assert (await run(await overlay.make(), "echo fine")).output == "fine\n"


def _init_of(workspace: Any) -> int:
    with open(f"/proc/self/fdinfo/{workspace._process}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


@pytest.fixture(params=["overlay", "plain"])
def either(request: pytest.FixtureRequest) -> Inside:
    inside: Inside = request.getfixturevalue(request.param)
    return inside


async def test_ending_a_workspaces_processes_on_a_busy_node_keeps_the_workspace(either: Inside) -> None:
    workspace = await either.make()
    init = _init_of(workspace)
    os.kill(init, signal.SIGSTOP)  # it gets no processor
    ending = asyncio.create_task(workspace.end_processes("Signal"))
    await asyncio.sleep(3)
    os.kill(init, signal.SIGCONT)
    await ending
    assert (await run(workspace, "echo fine")).output == "fine\n"


async def test_misspelt_user_is_reported_to_its_caller_and_does_not_prevent_overlay(tmp_path: Path) -> None:
    host, _ = await open_host(HostConfig(str(tmp_path), mode="Overlay", user="nobody-here"))
    try:
        with pytest.raises(FileFailure, match="user 'nobody-here' is not in"):
            await run(await Inside(host).make(), "true")
    finally:
        await host.close()


_WITHOUT_STREAMS = """
import asyncio, os, sys
os.closerange(0, 2)
from agent_runtime.executor.overlay import open_host, start_zygote
from agent_runtime.executor.overlay.config import HostConfig
start_zygote()
async def main():
    host, _ = await open_host(HostConfig(state_dir=sys.argv[1], mode="Overlay"))
    await host.close()
asyncio.run(main())
"""


def test_overlay_works_without_standard_streams(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_STREAMS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_auto_gives_the_reason_for_plain(tmp_path: Path) -> None:
    """A bind whose source does not exist makes Overlay impossible, wherever the tests run."""
    config = HostConfig(str(tmp_path), root=str(tmp_path), binds=(Bind("/no/such/folder", "/x"),))
    host, reason = await open_host(config)
    try:
        assert host.mode == "Plain"
        assert reason is not None
        assert "binds: '/no/such/folder' cannot be bound: No such file" in reason
    finally:
        await host.close()
    with pytest.raises(HostFailure, match="mode Overlay is unavailable here: binds"):
        await open_host(HostConfig(str(tmp_path), mode="Overlay", binds=config.binds))


async def test_idle_workspaces_are_not_looked_at(overlay: Inside) -> None:
    workspaces = [await overlay.make() for _ in range(20)]
    for workspace in workspaces:
        await run(workspace, "true")
    watch: Any = overlay.host.watch
    for _ in range(100):
        if not watch._active:
            break
        await asyncio.sleep(0.05)
    assert not watch._active


async def test_usage_reports_memory_processes_and_disk(tmp_path: Path) -> None:
    async with opened(HostConfig(str(tmp_path), mode="Overlay", memory_bytes=10**10)) as host:
        workspace = await host.create(WorkspaceSpec("w"))
        command, output = await start(workspace, "head -c 30000000 /dev/zero > /var/tmp/file; sleep 1000 & sleep 1000")
        for _ in range(200):
            used = workspace.usage()
            if used["diskBytes"] >= 30_000_000 and used["processes"] == 3:
                break
            await asyncio.sleep(0.05)
        assert used["processes"] == 3
        assert 30_000_000 <= used["diskBytes"] < 40_000_000
        assert used["memoryBytes"] > 0
        await command.child.signal(9, tree=True)
        os.close(output)


async def test_the_largest_workspace_is_killed_before_the_sandboxs_memory_is_used_up(tmp_path: Path) -> None:
    """Two workspaces without limits of their own: the larger one is killed before the sandbox's memory is used up."""
    async with opened(HostConfig(str(tmp_path), mode="Overlay", places=2, memory_bytes=300_000_000)) as host:
        small, large = await host.create(WorkspaceSpec("small")), await host.create(WorkspaceSpec("large"))
        script = "import time; x = b'x' * {}; print(1, flush=True); time.sleep(1000)"
        first, first_output = await start(small, [_PYTHON, "-c", script.format(100_000_000)])
        assert await asyncio.to_thread(os.read, first_output, 1) == b"1"
        second, second_output = await start(large, [_PYTHON, "-c", script.format(210_000_000)])
        assert (await asyncio.wait_for(second.exited, 120)).cause == "Memory"
        assert not first.exited.done()
        await first.child.signal(9, tree=True)
        for output in (first_output, second_output):
            os.close(output)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system, on a disk to which nothing else writes."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(512 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_end_of_a_workspace_does_not_wait_for_others_writes(disk: Path) -> None:
    (disk / "state").mkdir()
    async with opened(HostConfig(state_dir=str(disk / "state"), mode="Overlay")) as host:
        workspace = await host.create(WorkspaceSpec("w"))
        assert (await run(workspace, "echo some > /tmp/file; sync; cat /tmp/file")).output == "some\n"
        (disk / "of others").write_bytes(bytes(64 * 1024 * 1024))
        before = _written(disk)
        await workspace.destroy()
        assert _written(disk) - before < 32 * 1024 * 1024


async def test_layers_are_separate_from_inodes_freed_on_ext4(disk: Path) -> None:
    (disk / "state").mkdir()
    async with opened(HostConfig(state_dir=str(disk / "state"), mode="Overlay")):
        pass
    listed = await asyncio.to_thread(subprocess.check_output, ["lsattr", "-d", str(disk / "state/layers")], text=True)
    assert "T" in listed.split()[0]


def _written(disk: Path) -> int:
    """Return the bytes written to it. Field 7 of its statistics counts sectors of 512 bytes."""
    device = os.stat(disk).st_dev
    figures = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(figures[6]) * 512


async def test_killed_spares_cost_no_workspace(tmp_path: Path) -> None:
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay", places=3)) as opened_host:
        host: Any = opened_host
        async with asyncio.timeout(20):
            while len(keepers_children(host)[0]) < 3:  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.02)
            for pid in keepers_children(host)[0]:
                os.kill(pid, signal.SIGKILL)
            while keepers_children(host)[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        made = await asyncio.gather(*(host.create(WorkspaceSpec(f"w{number}")) for number in range(3)))
        assert [(await run(workspace, "echo made")).output for workspace in made] == ["made\n"] * 3


async def test_only_a_caller_that_needs_the_place_waits_for_removals(tmp_path: Path) -> None:
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay", places=2)) as opened_host:
        host: Any = opened_host
        await assert_no_layer_is_left_over(host)
        remover = keepers_children(host)[1]
        os.kill(remover, signal.SIGSTOP)
        try:
            async with asyncio.timeout(PATIENCE):
                await (await host.create(WorkspaceSpec("first"))).destroy()
                await host.create(WorkspaceSpec("second"))
                third = asyncio.create_task(host.create(WorkspaceSpec("third")))
                assert not (await asyncio.wait([third], timeout=0.3))[0]
                await assert_no_layer_is_left_over(host, but=1)
        finally:
            os.kill(remover, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE):
            assert (await run(await third, "echo made")).output == "made\n"
        await assert_no_layer_is_left_over(host)


async def test_missing_remover_prevents_new_workspaces_with_a_reason(tmp_path: Path) -> None:
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay", places=3)) as opened_host:
        host: Any = opened_host
        workspace = await host.create(WorkspaceSpec("w"))
        os.kill(keepers_children(host)[1], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            await host._remover.gone
        await workspace.destroy()
        with pytest.raises(WorkspaceFailure, match=r"that removes layers has ended .*; restart the executor"):
            await host.create(WorkspaceSpec("next"))


async def test_every_workspace_has_the_files_of_its_own_parent_in_any_order(overlay: Inside) -> None:
    parents: list[str | None] = [None]
    for name in ("a", "b"):
        parent = await overlay.make()
        mode = "711" if name == "a" else "755"
        assert (await run(parent, f"echo {name} > /tmp/parent; chmod {mode} /")).ok
        await parent.freeze()
        parents.append(parent.spec.id)
    seen = {None: "none 755\n", parents[1]: "a 711\n", parents[2]: "b 755\n"}
    # After two equal parents the executor prepares the next workspace in advance, which then fits or does not.
    for parent_id in (parents[number] for number in (0, 0, 0, 1, 1, 1, 2, 0, 1, 1, 2, 2, 0, 0, 1, 2, 2, 2)):
        workspace = await overlay.make(parent=parent_id)
        done = await run(workspace, "echo $(cat /tmp/parent 2>/dev/null || echo none) $(stat -c %a /)")
        assert done.output == seen[parent_id]
        await workspace.destroy()


async def test_failure_of_a_spare_does_not_affect_the_next_workspace(overlay: Inside, tmp_path: Path) -> None:
    frozen = await overlay.make()
    await frozen.freeze()
    for _ in range(2):
        await overlay.make(parent=frozen.spec.id)
    upper = tmp_path / "layers" / frozen.layer / "u0"
    await asyncio.sleep(0.3)  # the next one is ready
    upper.rename(upper.with_name("moved"))
    await overlay.make(parent=frozen.spec.id)
    await asyncio.sleep(0.3)  # the one after that has failed
    upper.with_name("moved").rename(upper)
    assert (await run(await overlay.make(parent=frozen.spec.id), "echo fine")).output == "fine\n"
    await assert_no_layer_is_left_over(overlay.host, but=1)
