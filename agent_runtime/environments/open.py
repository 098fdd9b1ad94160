"""Opens the environment of an attempt, and checks before the first rollout that all environments can be opened."""

import asyncio
import contextlib
import json
from collections.abc import Sequence

from agent_runtime.environments.act import DIVERGED, Act, action_results, require_same
from agent_runtime.environments.answers import ANSWER, AnswerForm
from agent_runtime.environments.host import EnvironmentFailure, EnvironmentHost
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.environments.sandboxed import SandboxedEpisode
from agent_runtime.sandboxes.base import Workspace
from agent_runtime.tasks.problems import TaskProblem, TaskSourceError
from rollout_api.environments import RunIn, TaskEnvironment
from rollout_api.records import Record
from rollout_api.rollout_job import Agent
from rollout_api.tasks import Task


async def open_environment(
    task: Task,
    pool: EnvironmentPool,
    workspace: Workspace,
    recorded: Sequence[Record],
    *,
    epoch: int,
    has_failed: bool = False,
) -> Act:
    """Reset the task's environment. Return the tool that acts in it, at the state where the attempt's record ends.

    `has_failed`: it failed at an action in an earlier attempt. A workspace that the policy has not used shows whether it
    works now.

    Raises EnvironmentFailure, and errors of a lost workspace.
    """
    environment, past = task.environment, action_results(recorded)
    assert environment is not None
    host: EnvironmentHost
    if environment.run_in is RunIn.SANDBOX:
        trial = (has_failed or kind_of(environment) not in pool.tried) and not past
        host = SandboxedEpisode(environment, task.timeouts, workspace, epoch, trial=trial)
    else:
        host = pool.episode(environment, task.timeouts)
    try:
        is_over = bool(past) and past[-1].stop
        start, again = await host.start([] if is_over else [step.data["action"] for step in past])
        require_same(past, again, DIVERGED)
        pool.tried.add(kind_of(environment))
        return Act(task, host, start, past)
    except BaseException:
        host.close()
        raise


def kind_of(environment: TaskEnvironment) -> str:
    """Return a key that is equal for environments that differ only in their seeds."""
    return json.dumps([environment.id, environment.config], sort_keys=True)


async def check_environments(tasks: Sequence[Task], agent: Agent, pool: EnvironmentPool) -> None:
    """Reset and step one environment of each kind that runs in a process next to the engine. Raises TaskSourceError
    with all problems."""
    kinds: dict[str, Task] = {}
    for task in tasks:
        if task.environment is not None and task.environment.run_in is RunIn.RUNNER:
            kinds.setdefault(kind_of(task.environment), task)
    found = await asyncio.gather(*(_problem(task, pool) for task in kinds.values()))
    problems = [problem for problem in found if problem is not None]
    if agent.type == "Environment":
        try:
            AnswerForm.of(agent.config.get("answerPattern", ANSWER))
        except ValueError as error:
            problems.append(TaskProblem("agent.config.answerPattern", None, str(error)))
        if not isinstance(separator := agent.config.get("actionSeparator", ""), str):
            problems.append(TaskProblem("agent.config.actionSeparator", None, f"is {separator!r}; expected text"))
    if problems:
        raise TaskSourceError(problems)


async def _problem(task: Task, pool: EnvironmentPool) -> TaskProblem | None:
    assert task.environment is not None
    try:
        episode = pool.episode(task.environment, task.timeouts)
        with contextlib.closing(episode):
            await episode.try_step()
    except EnvironmentFailure as error:
        return TaskProblem(f"task {task.name}", None, error.message)
    return None
