"""What is refused before the first rollout."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.opening import check_tasks
from agent_runtime.environments.host import EnvironmentFailure
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.tasks import TaskSourceError
from rollout_api.environments import TaskEnvironment
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task, Tasks, Timeouts


async def refused(
    sandbox_of_job: dict[str, Any] | None = None, of_job: dict[str, Any] | None = None, **fields: Any
) -> str:
    """Check one task; return why it is refused, "" if it is not."""
    task = Task.model_validate({"name": "t", "prompt": "p", **fields})
    spec: dict[str, Any] = {
        "mode": "Eval",
        "tasks": {"stream": {}},
        "agent": {"type": "Oracle"},
        "output": {"uri": "out"},
    }
    spec |= {"sandbox": sandbox_of_job or {}, **(of_job or {})}
    job = RolloutJob.model_validate(
        {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "j"}, "spec": spec}
    )
    try:
        await check_tasks(job, [task], EnvironmentPool(job.spec.tasks.own_environments))
    except TaskSourceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("working_dir", "verifier", "is_refused"),
    [
        ("/", {"commands": ["true"]}, True),
        ("/", {"commands": ["true"], "artifacts": ["."]}, True),
        ("/", {"commands": ["true"], "artifacts": ["srv"]}, False),
        ("/", {"commands": ["true"], "mode": "Shared"}, False),
        ("/srv", {"commands": ["true"]}, False),
    ],
)
async def test_root_is_not_carried_into_a_grading(working_dir: str, verifier: dict[str, Any], is_refused: bool) -> None:
    told = await refused(sandbox={"workingDir": working_dir}, verifier=verifier)
    assert ("the root cannot be carried into a grading" in told) == is_refused


async def test_agent_that_is_a_program_is_refused_where_it_cannot_act() -> None:
    agent = {
        "agent": {"type": "Command", "command": ["work"]},
        "model": {"endpoint": {"baseURL": "http://m/v1", "name": "m"}},
    }
    told = await refused(of_job=agent, environment={"id": "FrozenLake"}, sandbox={"image": "i"})
    assert "has an environment, in which an agent that is a program cannot act" in told


@pytest.mark.parametrize("of_job", [None, {"verifier": {"mode": "Shared"}}])
@pytest.mark.parametrize("fields", [{"collect": ["git diff > patch"]}, {"image": "grader"}])
async def test_what_needs_another_workspace_is_refused_in_shared(
    of_job: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    mode = {} if of_job else {"mode": "Shared"}
    told = await refused(of_job=of_job, verifier={"commands": ["true"], **fields, **mode})
    assert f"has verifier.{next(iter(fields))}, which needs another workspace for the grading" in told


async def test_services_that_would_not_be_started_are_refused() -> None:
    services = [{"name": "db", "command": ["serve"]}]
    assert await refused(services=services) == ""
    assert "need workspaces in Overlay" in await refused({"workspaces": {"mode": "Plain"}}, services=services)
    lake = {"id": "FrozenLake"}
    assert "its environment runs in the runner" in await refused(services=services, environment=lake)
    assert "runner" not in await refused(services=services, environment={**lake, "runIn": "Sandbox"})


async def test_dockerfiles_that_cannot_be_built_are_refused() -> None:
    told = await refused(
        dockerfile={"text": "FROM x\nBOO\n"}, verifier={"commands": ["true"], "dockerfile": {"text": "RUN a\nFROM x\n"}}
    )
    assert "task t: dockerfile, line 2: unknown instruction 'BOO'" in told
    assert "dockerfile, line 1: RUN comes before the first FROM" in told


async def test_a_data_set_names_no_code_that_runs_beside_the_engine(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    row = {"id": "subprocess:Popen", "config": {"args": ["touch", str(mark)]}}
    assert "list it in tasks.runnerEnvironments" in await refused(environment=row)
    assert await refused(environment={**row, "runIn": "Sandbox"}) == ""
    assert await refused(environment={"id": "FrozenLake"}) == ""
    pool = EnvironmentPool(["tests.support.games:Game"])
    with pytest.raises(EnvironmentFailure, match="list it in tasks"):
        pool.episode(TaskEnvironment.model_validate(row), Timeouts())
    assert not mark.exists()


def test_environments_of_the_manifest_itself_need_not_be_listed() -> None:
    inline = [{"name": "t", "prompt": "p", "environment": {"id": "a:A"}}, {"name": "u", "prompt": "p"}]
    assert Tasks.model_validate({"inline": inline}).own_environments == {"a:A"}
    assert Tasks.model_validate({"environments": [{"id": "b:B"}]}).own_environments == {"b:B"}
    assert Tasks.model_validate({"stream": {}, "runnerEnvironments": ["c:C"]}).own_environments == {"c:C"}
