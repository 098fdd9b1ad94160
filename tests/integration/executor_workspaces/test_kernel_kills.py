"""The kernel may end any process of a sandbox whose memory is used up. What was lost is not the workspace's own fault,
unless it is alone.
"""

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

    def kills(self, count: int, limit_hits: int = 0) -> None:
        (self.folder / "memory.events.local").write_text(f"oom {limit_hits}\noom_kill 0\n")
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


@pytest.mark.parametrize(
    ("sandbox", "cause"), [((4, 400 * MB), "OOMKilled"), ((4, None), "SandboxMemory")], indirect=["sandbox"]
)
async def test_all_that_run_end_if_the_kernel_has_ended_a_process(
    sandbox: tuple[Inside, ControlGroup], cause: str
) -> None:
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
        await child.signal(signal.SIGKILL, tree=False)
    assert (await child.exited).cause == cause
    assert (await other.exited).cause == cause
    for workspace in (lost, neighbour):
        with pytest.raises(WorkspaceFailure) as failure:
            await run(workspace, "true")
        assert failure.value.cause == cause
    assert (await run(idle, "exit 3")).exit.cause is None, "nothing of it ran"


async def test_what_the_kernel_ended_while_nothing_ran_is_no_loss(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    workspace = await inside.make(limits=Limits(memory_bytes=100 * MB))
    async with asyncio.timeout(20):
        while workspace.host.watch._awake.is_set():  # noqa: ASYNC110 there is no notification
            await asyncio.sleep(0.02)
    group.kills(1)
    assert (await run(workspace, "sleep 1; exit 3")).exit.cause is None


async def test_one_that_was_left_alone_is_not_to_blame(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    left = await inside.make(limits=Limits(memory_bytes=100 * MB))
    child = await sleeping(left)
    group.kills(1)
    assert (await child.exited).cause == "OOMKilled"


@pytest.mark.parametrize(
    ("sandbox", "own", "cause"),
    [((1, 400 * MB), 100 * MB, "OOMKilled"), ((1, None), None, "OOMKilled"), ((1, None), 100 * MB, "SandboxMemory")],
    indirect=["sandbox"],
)
async def test_a_workspace_that_is_alone_has_not_used_up_the_memory_of_others(
    sandbox: tuple[Inside, ControlGroup], own: int | None, cause: str
) -> None:
    """Within its own limit, where the sandbox has none, it cannot have."""
    inside, group = sandbox
    child = await sleeping(await inside.make(limits=Limits(memory_bytes=own)))
    group.kills(1)
    assert (await child.exited).cause == cause


@pytest.mark.parametrize("sandbox", [(1, 400 * MB)], indirect=True)
async def test_a_workspace_that_is_alone_has_used_up_the_memory_itself(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    workspace = await inside.make(limits=Limits(memory_bytes=100 * MB))
    child = await sleeping(workspace)
    group.kills(1, limit_hits=1)
    assert (await child.exited).cause == "Memory"
    async with asyncio.timeout(20):
        while workspace in workspace.host.watch._stopping:  # noqa: ASYNC110 there is no notification
            await asyncio.sleep(0.02)
    assert (await run(workspace, "exit 3")).exit.cause is None, "a later failure is its own"


async def test_lost_init_is_no_attack_if_the_kernel_has_ended_it(sandbox: tuple[Inside, ControlGroup]) -> None:
    inside, group = sandbox
    workspace, neighbour = [await inside.make(limits=Limits(memory_bytes=100 * MB)) for _ in range(2)]
    child = await sleeping(workspace)
    await sleeping(neighbour)
    group.kills(1)
    process: Any = workspace._process
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert (await child.exited).cause == "OOMKilled"
