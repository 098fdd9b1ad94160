"""A command's deadline and duration, with a clock that excludes standstills."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime.executor import timing
from agent_runtime.executor.commands import processes
from agent_runtime.executor.commands.processes import CommandSpec, Process
from agent_runtime.executor.commands.streams import Caps, Streams
from agent_runtime.executor.host import Exit
from agent_runtime.executor.overlay.pausing import Pause
from agent_runtime.executor.overlay.workspace import Workspace


class FakeWorkspace:
    """Starts nothing, and records signals."""

    def __init__(self) -> None:
        self.causes: list[str | None] = []
        self.signalled = asyncio.Event()
        self.pause = Pause()

    def start(self, request: Any, process: Process, descriptors: Any, **_: Any) -> "FakeWorkspace":
        process.started()
        return self

    async def signal(self, number: int, *, tree: bool, cause: str | None = None) -> None:
        self.causes.append(cause)
        self.signalled.set()


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processes, timing):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.1)


async def test_command_is_not_charged_for_a_pause() -> None:
    workspace, streams = FakeWorkspace(), Streams()
    process = Process("p", 0, CommandSpec("true", None, {}, None, None, None, 1.0, Caps(9, 9, 0)), streams, "")
    process.start(cast(Workspace, workspace), {}, lambda: None)
    workspace.pause.begin()
    await asyncio.sleep(1.5)
    assert process.is_paused
    assert workspace.causes == []
    workspace.pause.end()
    assert not process.is_paused
    assert process.seconds < 1
    await workspace.signalled.wait()
    assert workspace.causes == ["Deadline"]
    assert 1 <= process.seconds < 2
    process.ended(Exit(None, 9, None))
    process.discard()
    streams.close()


@pytest.mark.parametrize("deadline", [1.0, None])
async def test_command_is_not_charged_for_a_standstill(tmp_path: Path, deadline: float | None) -> None:
    workspace, streams = FakeWorkspace(), Streams()
    process = Process("p", 0, CommandSpec("true", None, {}, None, None, None, deadline, Caps(9, 9, 0)), streams, "")
    process.start(cast(Workspace, workspace), {}, lambda: None)
    await asyncio.sleep(0.15)
    time.sleep(1.5)  # noqa: ASYNC251 (as SIGSTOP does)
    await asyncio.sleep(0.01)
    assert workspace.causes == [], "a frozen container would fail its commands, and grade its rollouts with 0"
    assert process.seconds < 1
    process.ended(Exit(0, None, None))
    process.discard()
    streams.close()


async def test_continuing_command_reaches_its_deadline() -> None:
    workspace, streams = FakeWorkspace(), Streams()
    process = Process("p", 0, CommandSpec("true", None, {}, None, None, None, 0.3, Caps(9, 9, 0)), streams, "")
    process.start(cast(Workspace, workspace), {}, lambda: None)
    await workspace.signalled.wait()
    assert workspace.causes == ["Deadline"]
    assert process.seconds >= 0.3
    process.ended(Exit(None, 9, None))
    process.discard()
    streams.close()
