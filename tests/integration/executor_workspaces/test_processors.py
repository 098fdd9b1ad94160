"""Workspaces share processors. A policy must not starve its neighbours, whose commands would run into deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime.executor.host import Limits
from agent_runtime.executor.init import native, processes
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.hosts import OverlayHost
from agent_runtime.executor.overlay.workspace import Workspace
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import Inside, run, start

_PYTHON = getattr(sys, "_base_executable", sys.executable)
_BUSY = 100
_BURST_SECONDS = 0.1
_USES = f"import time\nwhile time.process_time() < {_BURST_SECONDS}: pass"
# Hashing releases the interpreter's lock, so that threads run side by side.
_HASHES = "import hashlib\nblock = bytes(1 << 18)\ndef burn():\n    while True: hashlib.sha256(block)\n"
_KEEPS_BUSY = {
    "processes": f"{_HASHES}import os, time\nfor _ in range({_BUSY}):\n    if os.fork() == 0: burn()\n",
    "threads": f"{_HASHES}import threading, time\nfor _ in range({_BUSY}): threading.Thread(target=burn).start()\n",
}


@pytest.fixture
def one_processor() -> Iterator[None]:
    """Give the test one processor, and an ordinary priority if this process may set one."""
    processors, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    os.sched_setaffinity(0, {min(processors)})
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.sched_setaffinity(0, processors)


def _processor_seconds(workspace: Workspace) -> float:
    used = 0
    for process in processes.descendants(processes.all_processes(workspace.proc), workspace.inner_init):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/self/fd/{workspace.proc}/{process.pid}/stat").read_text()
            used += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return used / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("user", ["0", *([pytest.param("1234", marks=pytest.mark.full)] if os.geteuid() == 0 else [])])
@pytest.mark.parametrize("what", sorted(_KEEPS_BUSY))
async def test_busy_workspace_leaves_its_neighbour_a_share_of_the_processor(
    one_processor: None, tmp_path: Path, what: str, user: str
) -> None:
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay", places=4)) as host:
        inside = Inside(host)
        busy, neighbour = await inside.make(limits=Limits(processes=2 * _BUSY)), await inside.make()
        assert isinstance(busy, Workspace)
        assert isinstance(host, OverlayHost)
        code = f"{_KEEPS_BUSY[what]}print('busy', flush=True)\ntime.sleep(600)"
        waiting, output = await start(busy, ["/bin/sh", "-c", '"$@"; :', "sh", _PYTHON, "-c", code], user=user)
        assert await asyncio.to_thread(os.read, output, 99) == b"busy\n"
        await run(neighbour, ["true"])
        before = _processor_seconds(busy)
        assert (await run(neighbour, [_PYTHON, "-c", _USES])).ok
        # Both have run since: the neighbour for its burst; the busy workspace would have used 100 times that if each
        # thread counted equally.
        assert _processor_seconds(busy) - before < _BUSY / 4 * _BURST_SECONDS
        # A process that only waits, such as a shell, keeps its priority, and so does the next command.
        (shell,) = (found for found in processes.all_processes(busy.proc) if found.pid == waiting.child.pid)
        assert shell.nice == host.tool_nice
        await waiting.child.signal(signal.SIGKILL, tree=True)
        assert (await run(busy, ["nice"], user=user)).output == f"{host.tool_nice}\n"
        os.close(output)


@pytest.mark.parametrize("language", ["C", "Python"])
async def test_tools_in_a_container_have_a_lower_priority_than_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    """So the executor answers while hundreds of threads are busy. Otherwise the runner would consider the sandbox lost."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if language == "Python":
        monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr("agent_runtime.executor.overlay.hosts._in_container", lambda: True)
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay")) as host:
        workspace = await Inside(host).make()
        assert isinstance(workspace, Workspace)
        assert (await run(workspace, "sleep 0.1; nice")).output == f"{min(19, own + 10)}\n"
        serving = [found for found in processes.all_processes(workspace.proc) if found.parent <= workspace.inner_init]
        assert len(serving) >= 2
        assert {found.nice for found in serving} == {own}
