from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_runtime.tasks.source import load_tasks
from rollout_api.environments import RunIn
from rollout_api.manifest import ManifestError, load_manifest
from rollout_api.tasks import Task, Tasks

HEAD = """
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {name: lake}
spec:
  model: {endpoint: {baseURL: "http://127.0.0.1/v1", name: m}}
  output: {uri: out}
"""


def loaded(*environments: dict[str, object]) -> list[Task]:
    return list(load_tasks(Tasks.model_validate({"environments": list(environments)}), Path(), {}).tasks)


def test_groups_are_tasks_with_their_own_seeds_partitioned_by_tag() -> None:
    tasks = loaded(
        {"id": "FrozenLake", "tag": "easy", "groups": 2, "seed": 10, "maxSteps": 5, "formatPenalty": -0.5},
        {"id": "ALE/Pong-v5", "seed": 10, "runIn": "Sandbox"},
    )
    assert [(task.name, task.tags) for task in tasks] == [
        ("easy-0", ["easy"]),
        ("easy-1", ["easy"]),
        ("ALE-Pong-v5-0", ["ALE-Pong-v5"]),
    ]
    environments = [task.environment for task in tasks]
    assert [one.seed for one in environments if one] == [10, 11, 10]
    assert [one.run_in for one in environments if one] == [RunIn.RUNNER, RunIn.RUNNER, RunIn.SANDBOX]
    assert [task.needs_sandbox for task in tasks] == [False, False, True]
    assert environments[0] is not None
    assert (environments[0].max_steps, environments[0].format_penalty) == (5, -0.5)


def test_two_kinds_that_would_give_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="two environments have the tag 'FrozenLake'; give each a different tag"):
        loaded({"id": "FrozenLake"}, {"id": "FrozenLake", "config": {"size": 8}})


def test_an_environment_grades_itself_so_a_verifier_beside_it_is_refused() -> None:
    with pytest.raises(ValidationError, match="remove verifier and steps, or the environment"):
        Task.model_validate(
            {"name": "t", "prompt": "p", "environment": {"id": "FrozenLake"}, "verifier": {"commands": ["true"]}}
        )


def test_sandbox_program_before_an_environment_is_refused() -> None:
    text = HEAD + "  tasks: {environments: [{id: FrozenLake}]}\n  agent: {type: Command, command: [run-me]}\n"
    with pytest.raises(ManifestError, match=r"agent.type Command .* tasks.environments"):
        load_manifest(text)
