"""The kernel may end any process of a sandbox whose memory is used up. Nothing tells whose memory it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.executor.host import Limits, WorkspaceFailure
from agent_runtime.executor.init.processes import all_processes
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.usage import KernelKills
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import Inside, run, start

MB = 1 << 20


class ControlGroup:
    """A copy of the files of a container's control group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "memory.max").write_text(str(500 * MB))
        (folder / "memory.stat").write_text("anon 0\nshmem 0\nkernel 0\n")
        self.kills(0)

    def kills(self, count: int) -> None:
        (self.folder / "memory.events").write_text(f"oom 0\noom_kill {count}\n")


@pytest.fixture
async def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Inside, ControlGroup]]:
    (tmp_path / "state").mkdir()
    places, memory_bytes = getattr(request, "param", (4, 400 * MB))
    config = HostConfig(state_dir=str(tmp_path / "state"), mode="Overlay", places=places, memory_bytes=memory_bytes)
    async with opened(config) as host:
        group = ControlGroup(tmp_path / "group")
        watch: Any = host
        watch.watch._kills = KernelKills(str(group.folder), "")
        yield Inside(host), group


async def sleeping(workspace: Any) -> Any:
    child, readable = await start(workspace, ["/bin/sleep", "600"])
    os.close(readable)
    return child


@pytest.mark.parametrize("sandbox", [(4, 400 * MB), (4, None)], indirect=True)
async def test_all_that_run_end_if_the_kernel_has_ended_a_process(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    limits = Limits(memory_bytes=100 * MB)
    lost, neighbour, idle = [await inside.make(limits=limits) for _ in range(3)]
    assert (await run(idle, "exit 3")).exit.cause is None
    async with asyncio.timeout(20):
        while idle.host.watch.is_active(idle):  # noqa: ASYNC110 there is no notification
            await asyncio.sleep(0.02)
    child, other = await sleeping(lost), await sleeping(neighbour)
    group.kills(1)
    with contextlib.suppress(WorkspaceFailure):  # the executor was first
        await child.child.signal(signal.SIGKILL, tree=False)
    assert (await child.exited).cause == "OOMKilled"
    assert (await other.exited).cause == "OOMKilled"
    for workspace in (lost, neighbour):
        with pytest.raises(WorkspaceFailure) as failure:
            await run(workspace, "true")
        assert failure.value.cause == "OOMKilled"
    assert (await run(idle, "exit 3")).exit.cause is None, "nothing of it ran"


async def test_what_the_kernel_ended_while_nothing_ran_is_no_loss(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    workspace = await inside.make(limits=Limits(memory_bytes=100 * MB))
    async with asyncio.timeout(20):
        while workspace.host.watch._awake.is_set():  # noqa: ASYNC110 there is no notification
            await asyncio.sleep(0.02)
    group.kills(1)
    assert (await run(workspace, "sleep 1; exit 3")).exit.cause is None


@pytest.mark.parametrize("sandbox", [(1, 400 * MB), (1, None)], indirect=True)
@pytest.mark.parametrize("own", [100 * MB, None])
async def test_one_that_is_alone_may_have_lost_its_memory_to_other_programs(
    sandbox: tuple[Inside, ControlGroup], own: int | None
) -> None:
    inside, group = sandbox
    child = await sleeping(await inside.make(limits=Limits(memory_bytes=own)))
    group.kills(1)
    assert (await child.exited).cause == "OOMKilled"


@pytest.mark.parametrize("code", [0, 3])
async def test_a_command_that_lost_a_program_may_end_with_any_code(
    sandbox: tuple[Inside, ControlGroup], code: int
) -> None:
    inside, group = sandbox
    workspace = await inside.make(limits=Limits(memory_bytes=100 * MB))
    child, readable = await start(workspace, ["/bin/sh", "-c", f"sleep 1; exit {code}"])
    os.close(readable)
    await measured_no_more(workspace)
    group.kills(1)
    assert (await child.exited).cause == "OOMKilled"


async def test_a_lost_file_operation_is_no_failure_of_the_files(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    workspace = await inside.make(limits=Limits(memory_bytes=100 * MB))
    assert (await run(workspace, "mkdir d; head -c 3000000 /dev/zero > d/a")).ok
    before = {process.pid for process in all_processes(workspace.proc)}
    readable, writable = os.pipe()
    reading = asyncio.create_task(workspace.file("tar", {"path": "d"}, writable))
    async with asyncio.timeout(20):
        while not (helpers := {process.pid for process in all_processes(workspace.proc)} - before):  # noqa: ASYNC110 there is no notification
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # it waits for a reader
    await measured_no_more(workspace)
    group.kills(1)
    for pid in helpers:
        kill_inside(workspace, pid)
    with pytest.raises(WorkspaceFailure) as failure:
        await reading
    assert failure.value.cause == "OOMKilled"
    os.close(readable)


async def measured_no_more(workspace: Any) -> None:
    """End the measurements, so that none comes between a kill and its effect."""
    task = workspace.host.watch._task
    task.cancel()
    await asyncio.wait([task])


def kill_inside(workspace: Any, pid: int) -> None:
    """Kill a process that has this id inside the workspace."""
    for process in all_processes(workspace.host.proc):
        with contextlib.suppress(OSError):
            ids = Path(f"/proc/{process.pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()
            if process.parent == workspace.init_pid and ids[-1] == str(pid):
                os.kill(process.pid, signal.SIGKILL)


async def test_lost_init_is_no_attack_if_the_kernel_has_ended_it(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    workspace, neighbour = [await inside.make(limits=Limits(memory_bytes=100 * MB)) for _ in range(2)]
    child = await sleeping(workspace)
    await sleeping(neighbour)
    group.kills(1)
    process: Any = workspace._process
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert (await child.exited).cause == "OOMKilled"
