"""A command's deadline and duration, with a clock that excludes standstills."""

import asyncio
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_runtime.executor import timing
from agent_runtime.executor.commands import processes
from agent_runtime.executor.commands.processes import CommandSpec, Process
from agent_runtime.executor.commands.streams import Caps, Streams
from agent_runtime.executor.host import Exit
from agent_runtime.executor.http.fields import Query
from agent_runtime.executor.init.processes import Process as ToolProcess
from agent_runtime.executor.overlay import pausing
from agent_runtime.executor.overlay.pausing import Pause
from agent_runtime.executor.overlay.workspace import Workspace
from agent_runtime.executor.routes import process_calls
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.usefixtures("virtual_clock")


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


async def test_pause_for_memory_neither_begins_nor_continues_processes_during_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(pausing, "_send", lambda proc, pid, number: sent.append((pid, number)))
    tools, pause = [ToolProcess(5, 4, "S"), ToolProcess(6, 5, "T")], Pause()
    pause.begin()
    pause.stop(3, tools)
    pause.lease(60, lambda: None)
    pause.proceed(3, tools)  # memory is free again
    pause.end()
    pause.begin()
    assert (pause.is_on, pause.is_for_memory, sent) == (True, False, [(5, signal.SIGSTOP)])
    pause.end_lease([(3, tools)])
    pause.end_lease([(3, tools)])
    assert (pause.is_on, sent[1:]) == (False, [(5, signal.SIGCONT)]), "one that a tool has stopped stays stopped"


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
async def test_command_is_not_charged_for_a_standstill(virtual_clock: VirtualClock, deadline: float | None) -> None:
    workspace, streams = FakeWorkspace(), Streams()
    process = Process("p", 0, CommandSpec("true", None, {}, None, None, None, deadline, Caps(9, 9, 0)), streams, "")
    process.start(cast(Workspace, workspace), {}, lambda: None)
    await asyncio.sleep(0.15)
    virtual_clock.now += 1.5  # as SIGSTOP does
    await asyncio.sleep(0.01)
    assert workspace.causes == [], "a frozen container would fail its commands, and grade its rollouts with 0"
    assert process.seconds < 1
    process.ended(Exit(0, None, None))
    process.discard()
    streams.close()


class SlowWorkspace(FakeWorkspace):
    """Starts its command when told."""

    def start(self, request: Any, process: Process, descriptors: Any, **_: Any) -> FakeWorkspace:
        return self


@pytest.mark.parametrize("deadline", [1.0, None])
async def test_only_a_start_whose_caller_has_a_clock_of_its_own_forbids_pauses(deadline: float | None) -> None:
    workspace, streams = SlowWorkspace(), Streams()
    process = Process("p", 0, CommandSpec("true", None, {}, None, "Open", None, deadline, Caps(9, 9, 0)), streams, "")
    process.start(cast(Workspace, workspace), {}, lambda: None)
    workspace.pause.begin()
    assert workspace.pause.is_on == (deadline is not None)
    process.started()
    assert not workspace.pause.is_forbidden
    process.ended(Exit(0, None, None))
    process.discard()
    streams.close()


async def test_workspace_does_not_pause_while_a_caller_waits_for_output_or_input() -> None:
    workspace, streams = FakeWorkspace(), Streams()
    process = Process("p", 0, CommandSpec("cat", None, {}, None, "Open", None, None, Caps(9, 9, 0)), streams, "")
    process.start(cast(Workspace, workspace), {}, lambda: None)
    entry: Any = SimpleNamespace(processes={"p": process}, id="w")

    def call(query: dict[str, list[str]], body: bytes = b"") -> Any:
        segments = ["workspaces", "w", "processes", "p"]
        return SimpleNamespace(
            seen=lambda: entry, owned=lambda: entry, segments=segments, body=body, query=lambda: Query(query)
        )

    waiting = [
        asyncio.create_task(process_calls.show_output(call({"waitSeconds": ["25"]}))),
        asyncio.create_task(process_calls.write_input(call({"offset": ["0"]}, bytes(1 << 20)))),
    ]
    await asyncio.sleep(0.05)
    for task in waiting:
        assert workspace.pause.is_forbidden
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not workspace.pause.is_forbidden
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
