import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime.environments.hosted.sandboxed import latest
from agent_runtime.environments.open import open_environment
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.environments.sandboxed import SandboxedEpisode, program
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure
from agent_runtime.sandboxes.executor_client.values import not_started
from rollout_api.environments import TaskEnvironment
from rollout_api.tasks import Task, Timeouts

GAME = """
class Game:
    def reset(self, seed):
        return f"seed {seed}", {}

    def step(self, action):
        return action, 1.0, True, False, {}
"""
ASK = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from agent_runtime.environments.hosted.sandboxed import Kept
start = {"id": "solo:Game", "seed": 4, "maxSteps": 2, "formatPenalty": 0, "config": {}}
print(json.dumps(Kept().answer({"start": start, "actions": ["go"]})))
"""


def test_sandbox_program_needs_only_python_and_the_environments_imports(tmp_path: Path) -> None:
    (tmp_path / "environment.zip").write_bytes(program())
    (tmp_path / "solo.py").write_text(GAME)
    # -I and -S: neither this repository nor any installed package can be found.
    command = [sys.executable, "-I", "-S", "-c", ASK, str(tmp_path / "environment.zip"), str(tmp_path)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert answer["start"]["observation"] == "seed 4"
    assert [move["observation"] for move in answer["moves"]] == ["go"]


def test_an_answer_always_has_its_own_move_and_fits_into_one_output() -> None:
    long = {"observation": "x" * 200_000}
    assert latest([long, long, long]) == [long]
    assert latest([{"observation": "a"}, {"observation": "b"}]) == [{"observation": "a"}, {"observation": "b"}]
    assert latest([{"observation": "x" * 900_000}]) == [{"observation": "x" * 900_000}]


async def test_the_start_of_a_resumed_episode_has_time_for_its_repeated_steps() -> None:
    asked: dict[str, Any] = {}

    class Alive:
        async def stat(self, _path: str) -> bool:
            return True

        async def run(self, _command: object, **options: object) -> CommandResult:
            asked.update(options)
            move = {"observation": "b", "reward": 1.0, "terminated": False, "truncated": False, "valid": True}
            reply = json.dumps({"start": {"observation": "a", "instruction": ""}, "moves": [move]}).encode()
            return CommandResult(0, None, None, 0.1, reply, b"", len(reply), 0)

    environment, timeouts = TaskEnvironment.model_validate({"id": "solo:Game"}), Timeouts(command_seconds=5)
    episode = SandboxedEpisode(environment, timeouts, cast(Any, Alive()), 2, trial=False)
    start, moves = await episode.start(["go"] * 20)
    assert asked["deadline_seconds"] == timeouts.setup_seconds + 100
    assert (start.observation, [move.observation for move in moves]) == ("a", ["b"])


@pytest.mark.parametrize(("has_failed", "tries"), [(False, [True, False]), (True, [True, True])])
async def test_a_step_is_tried_again_before_the_attempt_after_a_failed_action(
    has_failed: bool, tries: list[bool]
) -> None:
    tried: list[bool] = []

    class Alive:
        async def stat(self, _path: str) -> bool:
            return True

        async def run(self, _command: object, *, stdin: bytes, **_options: object) -> CommandResult:
            tried.append(json.loads(stdin)["try"])
            reply = json.dumps({"start": {"observation": "a", "instruction": ""}, "moves": []}).encode()
            return CommandResult(0, None, None, 0.1, reply, b"", len(reply), 0)

    environment = TaskEnvironment.model_validate({"id": "solo:Game", "runIn": "Sandbox"})
    task, pool = Task(name="t", prompt="{observation}", environment=environment), EnvironmentPool()
    await open_environment(task, pool, cast(Any, Alive()), [], epoch=1)
    await open_environment(task, pool, cast(Any, Alive()), [], epoch=1, has_failed=has_failed)
    assert tried == tries


async def test_a_step_that_cannot_be_started_is_a_failure_of_the_sandbox() -> None:
    class Full:
        async def run(self, _command: object, **_options: object) -> CommandResult:
            return not_started("fork: Resource temporarily unavailable")

    environment = TaskEnvironment.model_validate({"id": "solo:Game"})
    episode = SandboxedEpisode(environment, Timeouts(), cast(Any, Full()), 1, trial=False)
    with pytest.raises(SandboxFailure, match="a step of solo:Game cannot be started: fork"):
        await episode.take([], "go", cast(Any, Full()))
