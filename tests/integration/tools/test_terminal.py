"""The terminal tool on a real executor: it stays open between calls and runners, and no input is typed twice."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import agent_runtime.tools.terminal as terminal_module
from agent_runtime.engine.attempt.tool_calls import KeyedWorkspace
from agent_runtime.sandboxes.base import Fence, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.local.provider import LocalProvider
from agent_runtime.tools.base import ToolContext, ToolError, ToolResult
from agent_runtime.tools.terminal import terminal
from rollout_api.sandbox import SandboxTemplate
from rollout_api.tasks import Task

TASK = Task.model_validate({"name": "t", "prompt": "p", "timeouts": {"commandSeconds": 20}})
SPEC = WorkspaceSpec(group="task-1", working_dir="/workspace", network={"agent": "None"})


class Runner:
    """One runner's view of a workspace; the call number is the turn."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    async def use(self, turn: int, **arguments: Any) -> ToolResult:
        keyed = KeyedWorkspace(self.workspace, f"{turn}:0", 20)
        return await terminal.execute(arguments, ToolContext(keyed, TASK, "call", 60))

    async def type(self, turn: int, text: str, **arguments: Any) -> str:
        return (await self.use(turn, text=text, **arguments)).content


@pytest.fixture(params=["Overlay", "Plain"])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalProvider]:
    template = SandboxTemplate.model_validate({"workspaces": {"mode": request.param}, "idleSeconds": 60})
    provider = LocalProvider(tmp_path / "run", template, places=1)
    await provider.open()
    yield provider
    await provider.close()


@pytest.fixture
async def runner(provider: LocalProvider) -> Runner:
    return Runner(await provider.acquire(SPEC, attempt="0-1", fence=Fence(1, "first"), name="agent"))


async def test_directory_and_variables_stay_and_programs_that_ask_can_be_answered(runner: Runner) -> None:
    await runner.type(1, "mkdir -p here && cd here && NAME=Ada\n")
    assert "/here Ada" in await runner.type(2, "echo $PWD $NAME\n")
    assert "who?" in await runner.type(3, "read -p 'who? ' WHO\n", wait=1)
    assert "it is Grace" in await runner.type(4, "Grace\necho it is $WHO\n")


async def test_full_screen_program_is_shown_as_on_a_terminal(runner: Runner) -> None:
    screen = await runner.type(1, r"clear; printf 'abc\033[1;1HX\033[3;5Hdeep\n'" + "\n")
    assert screen.split("\n")[0].startswith("Xbc")
    assert screen.split("\n")[2] == "    deep"


async def test_a_running_program_is_interrupted_by_its_key_and_the_terminal_lives_on(runner: Runner) -> None:
    assert "forever" in await runner.type(1, "echo forever; sleep 600\n", wait=0.5)
    assert "back" in await runner.type(2, "", keys=["C-c"]) + await runner.type(3, "echo back\n")


async def test_the_next_runner_finds_the_terminal_and_types_nothing_twice(
    runner: Runner, provider: LocalProvider
) -> None:
    await runner.type(1, "echo one >> log; X=kept\n")
    await runner.type(2, "echo two >> log\n")
    taken_over = Runner(await provider.reattach(runner.workspace.handle, spec=SPEC, fence=Fence(2, "second")))
    await taken_over.type(2, "echo two >> log\n")
    assert "one two three kept" in await taken_over.type(3, "echo three >> log; echo $(cat log) $X\n")


# The second shell closes the terminal slightly before it ends, as any shell may on a busy machine.
@pytest.mark.parametrize("text", ["exit\n", "exec bash -c 'exec </dev/null >/dev/null 2>&1; sleep 0.5'\n"])
async def test_ended_shell_is_reported_and_the_next_call_has_a_new_one(runner: Runner, text: str) -> None:
    assert (await runner.use(1, text=text, wait=20)).data["ended"]
    assert "again" in await runner.type(2, "echo again\n")


async def test_program_that_reads_no_input_is_reported_and_keeps_the_sandbox(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_module, "INPUT_SECONDS", 1.0)
    await runner.type(1, "stty raw -echo; sleep 600\n", wait=1)
    with pytest.raises(ToolError, match="does not read"):
        await runner.type(2, "x" * 200_000)
    assert (await runner.workspace.run("echo alive", key="3:look", deadline_seconds=20)).stdout == b"alive\n"


async def test_unknown_key_is_explained_and_nothing_is_typed(runner: Runner) -> None:
    with pytest.raises(ToolError, match=r"no key named 'Return'.*Enter"):
        await runner.use(1, text="rm -rf /\n", keys=["Return"])
    assert "rm" not in await runner.type(2, "")
