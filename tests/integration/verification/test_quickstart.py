"""The quickstart's rewards: solutions pass, scripted members get what README.md promises, and cheats get nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.grading.artifacts import carry_rules
from agent_runtime.grading.grade import grade
from agent_runtime.models.base import ToolCall
from agent_runtime.tasks import load_tasks
from agent_runtime.tools.base import ToolContext, dispatch
from agent_runtime.tools.registry import open_tools
from rollout_api.manifest import load_manifest
from rollout_api.model import ScriptedMember
from rollout_api.records import Verdict
from rollout_api.tasks import Task
from tests.support.quickstart import REWARDS

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
JOB = load_manifest(QUICKSTART / "job.yaml")
TASKS = load_tasks(JOB.spec.tasks, QUICKSTART, {}).tasks
assert JOB.spec.model is not None
assert JOB.spec.model.scripted is not None
SCRIPTS = {script.task: script.members for script in JOB.spec.model.scripted.tasks}

CASES = [(name, member) for name, rewards in REWARDS.items() for member in range(len(rewards))]


async def prepare(workspace: Any, task: Task) -> None:
    for file in task.files:
        await workspace.write(file.path, file.data(), key="0:file", mode=file.mode)


async def graded(task: Task, agent: Any, grading: Any) -> Verdict:
    """Grade like the engine in mode Separate: the prepared state, the carried files, the hidden tests."""
    await prepare(grading, task)
    folder, rules = carry_rules(task, JOB.spec.verifier, grading.working_dir)
    carried = await grading.carry(folder, rules, agent.tar(folder, parts=["."]), key="0:carry")
    return await grade(task, JOB.spec.verifier, grading, key_turn=1, dropped=carried.dropped)


async def play(workspace: Any, task: Task, member: ScriptedMember) -> None:
    """Run the member's tool calls with the real tools, without a model or an agent."""
    tools = open_tools(JOB.spec.agent.tools)

    class Keyless:
        """A workspace without keys. The tools number their own calls, and a folder needs no keys."""

        working_dir = workspace.working_dir

        def __getattr__(self, name: str) -> Any:
            async def call(*arguments: Any, **options: Any) -> Any:
                return await getattr(workspace, name)(*arguments, key="0:tool", **options)

            return call

    for number in range(JOB.spec.agent.max_turns):
        turn = member.turns[min(number, len(member.turns) - 1)]
        if not turn.tool_calls:
            return
        for call in turn.tool_calls:
            arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            context = ToolContext(Keyless(), task, f"call-{number}", 60.0)
            done = await dispatch(tools, ToolCall(f"call-{number}", call.name, arguments), context)
            if done.stop:
                return


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
async def test_the_solution_of_every_task_scores_1_and_doing_nothing_0(
    task: Task, new_workspace: Callable[[], Any]
) -> None:
    untouched, solved = new_workspace(), new_workspace()
    await prepare(untouched, task)
    assert (await graded(task, untouched, new_workspace())).reward == 0
    await prepare(solved, task)
    for command in task.solution:
        assert (await solved.run(command, key="0:solve", deadline_seconds=30)).ok
    verdict = await graded(task, solved, new_workspace())
    assert (verdict.reward, verdict.passed) == (1, True), verdict


@pytest.mark.full
@pytest.mark.parametrize(("name", "member"), CASES)
async def test_each_member_gets_the_reward_that_the_readme_promises(
    name: str, member: int, new_workspace: Callable[[], Any]
) -> None:
    task = next(task for task in TASKS if task.name == name)
    agent = new_workspace()
    await prepare(agent, task)
    await play(agent, task, SCRIPTS[name][member])
    verdict = await graded(task, agent, new_workspace())
    assert verdict.reward == REWARDS[name][member], verdict


def test_readme_has_the_actual_rewards() -> None:
    lines = (QUICKSTART / "README.md").read_text().splitlines()
    rows = {cells[1].strip(" `"): cells[2:6] for line in lines if (cells := line.split("|")) and len(cells) == 7}
    promised = {name: [float(cell.split()[0]) for cell in cells] for name, cells in rows.items() if name in REWARDS}
    assert promised == REWARDS


def test_the_task_file_has_the_tasks_of_the_manifest() -> None:
    job = load_manifest(QUICKSTART / "oracle.yaml")
    assert list(load_tasks(job.spec.tasks, QUICKSTART, {}).tasks) == TASKS
