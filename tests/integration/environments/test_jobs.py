"""Whole jobs in environments: what is rewarded, what is masked, and what remains after a killed runner."""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.engine.run import run_job
from agent_runtime.engine.session import RolloutSession
from agent_runtime.models.providers.function import FunctionModel
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from agent_runtime.tasks import TaskSourceError
from rollout_api.environments import TaskEnvironment
from rollout_api.records import Outcome, Result, StopReason
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task
from tests.support.fingerprint import fingerprint
from tests.support.games import wander
from tests.support.resumed import resumed_rollouts, segments_in

ROOT = Path(__file__).parents[3]
ROLLOUTCTL = [str(Path(sys.executable).parent / "rolloutctl"), "run", "job.yaml", "-o", "json"]
GAME = "tests.support.games:Game"
KILLS = 3


def document(*environments: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "acting"},
        "spec": {
            "mode": "Eval",
            "tasks": {"environments": list(environments)},
            "agent": {"type": "Environment"},
            "model": {"function": "tests.support.games:wander"},
            "attempts": {"limit": 2, "backoffSeconds": 0},
            "completion": {"maxInfraFailureFraction": 1},
            "output": {"uri": "out"},
            **spec,
        },
    }


async def results(folder: Path, answers: dict[str, str], *environments: dict[str, Any], **spec: Any) -> list[Result]:
    """Run a job in which each environment's model always gives the answer of that task. An answer `A, B` means A in the
    first turn and B later.
    """

    async def answer(messages: list[dict[str, Any]], task: str) -> str:
        first, *others = answers[task].split(", ")
        is_first = all(message["role"] != "assistant" for message in messages)
        return first if is_first or not others else others[0]

    job = RolloutJob.model_validate(document(*environments, **spec))
    await run_job(job, base_dir=folder, environ={}, model=FunctionModel(answer, "test"))
    return list((await reader(folder)).results())


async def reader(folder: Path) -> RunReader:
    return await open_run(Store.open(str(folder / "out"), {}), "acting")


async def test_no_answer_of_the_policy_can_get_it_masked_or_tried_again(tmp_path: Path) -> None:
    tags = {"silent": "", "wordy": "I go right.", "wrong": "<answer>Fly</answer>", "cut": "<answer>Right"}
    environments = [
        {"id": "FrozenLake", "tag": tag, "maxSteps": 3, "formatPenalty": -0.25, "config": {"is_slippery": False}}
        for tag in tags
    ]
    ended = await results(tmp_path, {f"{tag}-0": answer for tag, answer in tags.items()}, *environments)
    for result in ended:
        assert (result.outcome, result.stop_reason) == (Outcome.COMPLETED, StopReason.FINISHED)
        assert (result.reward, result.passed, result.failed_attempts) == (-0.75, False, [])


async def test_answer_with_several_actions_takes_each_as_a_step_up_to_max_steps(tmp_path: Path) -> None:
    lake = {"id": "FrozenLake", "config": {"is_slippery": False, "desc": ["SFF", "FFF", "FFG"]}, "formatPenalty": -0.25}
    environments = [{**lake, "tag": "all", "maxSteps": 9}, {**lake, "tag": "three", "maxSteps": 3}]
    way = "<answer>Down || Down|| ||Right || Right || Left</answer>"
    reached, cut = await results(
        tmp_path,
        {"all-0": way, "three-0": way},
        *environments,
        agent={"type": "Environment", "config": {"actionSeparator": "||"}},
    )
    assert (reached.reward, reached.turns, reached.passed) == (1.0, 1, True)
    assert (cut.reward, cut.turns, cut.passed) == (0.0, 1, False)
    assert cut.verifier_message is None


def game(name: str, run_in: str, max_steps: int = 100, **timeouts: float) -> dict[str, Any]:
    """A task with a game; a sandbox has it among the task's files."""
    files = [{"path": "games.py", "content": (ROOT / "tests/support/games.py").read_text()}]
    return {
        "name": name,
        "prompt": "{observation}",
        "files": files if run_in == "Sandbox" else [],
        "timeouts": timeouts,
        "environment": {"id": "games:Game" if run_in == "Sandbox" else GAME, "maxSteps": max_steps, "runIn": run_in},
    }


@pytest.mark.parametrize("run_in", ["Runner", "Sandbox"])
async def test_policy_that_makes_its_environment_hang_is_graded(tmp_path: Path, run_in: str) -> None:
    ended = await results(
        tmp_path,
        {"hanging": "<answer>hang</answer>", "fine": "<answer>end</answer>"},
        tasks={"inline": [game(name, run_in, commandSeconds=1) for name in ("hanging", "fine")]},
        reward={"groupBy": "Batch", "method": "Mean"},
    )
    hanging, fine = ended
    assert (hanging.outcome, hanging.stop_reason, hanging.reward) == (Outcome.COMPLETED, StopReason.RESOURCE_LIMIT, 0.0)
    assert [attempt.reason for attempt in hanging.failed_attempts] == ["EnvironmentHung"]
    assert (fine.outcome, fine.reward) == (Outcome.COMPLETED, 1.0)
    assert (hanging.advantage, fine.advantage) == (-0.5, 0.5)


async def test_outage_of_what_an_environment_calls_gives_no_reward(tmp_path: Path) -> None:
    outage = tmp_path / "outage"

    async def answer(messages: list[dict[str, Any]], turn: int) -> str:
        if turn == 2:
            outage.write_text("raise")
        return "<answer>go</answer>"

    away = {"id": GAME, "config": {"outage": str(outage)}}
    job = RolloutJob.model_validate(document(away, attempts={"limit": 1, "backoffSeconds": 0}))
    await run_job(job, base_dir=tmp_path, environ={}, model=FunctionModel(answer, "test"))
    [result] = (await reader(tmp_path)).results()
    assert (result.outcome, result.reason, result.reward) == (Outcome.INFRA_FAILED, "EnvironmentFailed", None)


@pytest.mark.parametrize("run_in", ["Runner", "Sandbox"])
async def test_slow_environment_costs_no_agent_time_and_cannot_be_faked(tmp_path: Path, run_in: str) -> None:
    slow = game("slow", run_in, max_steps=2, agentSeconds=1, commandSeconds=60)
    [result] = await results(tmp_path, {"slow": "<answer>slow</answer>"}, tasks={"inline": [slow]})
    assert (result.outcome, result.stop_reason, result.reward) == (Outcome.COMPLETED, StopReason.FINISHED, 2.0)


async def test_environment_with_a_wrong_step_result_is_found_before_the_first_rollout(tmp_path: Path) -> None:
    with pytest.raises(TaskSourceError, match="step returned 4 values, expected Gymnasium's five"):
        await results(tmp_path, {}, {"id": "tests.support.games:OldGame", "tag": "old"})


@pytest.mark.parametrize("action", ["raise", "die"])
@pytest.mark.parametrize("answers", ["<answer>go</answer>, <answer>{}</answer>", "<answer>go||{}||go</answer>"])
async def test_a_policy_that_makes_its_environment_fail_keeps_the_rewards_of_its_steps(
    tmp_path: Path, action: str, answers: str
) -> None:
    [result] = await results(
        tmp_path,
        {"b-0": answers.format(action)},
        {"id": GAME, "tag": "b"},
        attempts={"limit": 1, "backoffSeconds": 0},
        agent={"type": "Environment", "config": {"actionSeparator": "||"}},
    )
    assert (result.outcome, result.stop_reason, result.reward) == (Outcome.COMPLETED, StopReason.RESOURCE_LIMIT, 1.0)


async def test_only_actions_that_were_taken_are_steps(tmp_path: Path) -> None:
    """At most 128 calls of an answer are run, and the model sees what the last of them led to."""
    seen = []

    async def answer(messages: list[dict[str, Any]]) -> str:
        seen.append(messages[-1]["content"])
        return f"<answer>{'||'.join(['go'] * 200)}</answer>"

    agent = {"type": "Environment", "config": {"actionSeparator": "||"}, "maxTurns": 9}
    job = RolloutJob.model_validate(document({"id": GAME, "maxSteps": 200}, agent=agent))
    await run_job(job, base_dir=tmp_path, environ={}, model=FunctionModel(answer, "test"))
    [result] = (await reader(tmp_path)).results()
    assert (result.reward, result.turns) == (200.0, 2)
    assert "go 128" in seen[1]
    assert "At most 128" in seen[1]


async def test_long_episodes_are_cut_by_the_agents_context(tmp_path: Path) -> None:
    sizes = []

    async def answer(messages: list[dict[str, Any]]) -> str:
        sizes.append(len(messages))
        return "<answer>go</answer>"

    agent = {"type": "Environment", "context": {"maxMessages": 6}}
    job = RolloutJob.model_validate(document({"id": GAME, "maxSteps": 9}, agent=agent))
    await run_job(job, base_dir=tmp_path, environ={}, model=FunctionModel(answer, "test"))
    assert (len(sizes), max(sizes)) == (9, 6)


async def test_environment_in_a_sandbox_with_a_wrong_step_result_gives_no_reward(tmp_path: Path) -> None:
    task = game("old", "Sandbox")
    task["environment"]["id"] = "games:OldGame"
    [result] = await results(tmp_path, {"old": "<answer>go</answer>"}, tasks={"inline": [task]})
    assert (result.outcome, result.reason, result.reward) == (Outcome.INFRA_FAILED, "EnvironmentFailed", None)


async def test_a_model_with_native_tools_acts_by_the_tool_and_sees_the_same_map(tmp_path: Path) -> None:
    async def call(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        assert [tool["function"]["name"] for tool in tools] == ["act"]
        function = {"name": "act", "arguments": '{"action": "Down"}'}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    lake = {"id": "FrozenLake", "maxSteps": 2, "config": {"is_slippery": False}}
    job = RolloutJob.model_validate(document(lake, agent={"type": "ToolCalling"}))
    await run_job(job, base_dir=tmp_path, environ={}, model=FunctionModel(call, "test"))
    run = await reader(tmp_path)
    [result] = run.results()
    assert (result.outcome, result.tool_calls, result.stop_reason) == (Outcome.COMPLETED, 2, StopReason.FINISHED)
    trajectory = await run.trajectory(0)
    assert trajectory is not None
    assert "Actions: Left, Down, Right, Up" in str(trajectory["steps"][1]["message"])


async def test_a_trainer_submits_environments_and_gets_groups_with_their_advantages(tmp_path: Path) -> None:
    document_ = document(groupSize=4, reward={"groupBy": "Group", "method": "Mean"})
    document_["spec"]["tasks"] = {"stream": {}}
    job = RolloutJob.model_validate(document_)
    async with RolloutSession(job, base_dir=tmp_path, model=FunctionModel(wander, "test")) as session:
        for seed in (1, 2):
            lake = TaskEnvironment(id="FrozenLake", seed=seed, max_steps=4, format_penalty=-1)
            await session.submit(Task(name=f"lake-{seed}", prompt="{observation}", environment=lake), f"step-{seed}")
        await session.close()
        groups = [group async for group in session]
    assert {group.label for group in groups} == {"step-1", "step-2"}
    for group in groups:
        rewards = [result.reward or 0 for result in group.results]
        mean = sum(rewards) / len(rewards)
        assert [result.advantage for result in group.results] == pytest.approx([reward - mean for reward in rewards])
        assert {result.batch for result in group.results} == {group.label}


async def test_task_that_cannot_be_opened_is_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"Nope-v1(.|\n)*'siz'"):
        await results(
            tmp_path,
            {},
            {"id": "Nope-v1"},
            {"id": "FrozenLake", "config": {"siz": 4}},
            {"id": "FrozenLake", "tag": "b"},
        )
    assert not list((tmp_path / "out").glob("acting-*"))


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Variables with a separate temporary folder, because the test's path may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        yield dict(os.environ, TMPDIR=temporary, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "operator")]))


@pytest.mark.parametrize("run_in", ["Runner", pytest.param("Sandbox", marks=pytest.mark.full)])
def test_killed_runner_leaves_the_same_episodes_as_an_undisturbed_one(
    tmp_path: Path, environ: dict[str, str], run_in: str
) -> None:
    slippery = {"id": "FrozenLake", "groups": 3, "seed": 5, "maxSteps": 8, "formatPenalty": -0.1, "runIn": run_in}
    # A sandbox has the programs of this machine, and the environment needs numpy.
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    sandbox = {"env": [{"name": "PATH", "value": path}]}
    job = document(slippery, groupSize=2, runners={"concurrency": 6}, sandbox=sandbox)
    folders = [tmp_path / "calm", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
    drawn = random.Random(run_in)
    run_to_its_end(folders[0], environ, 0, drawn)
    run_to_its_end(folders[1], environ, KILLS, drawn)

    async def compare() -> None:
        calm, killed = [await fingerprint(Store.open(str(folder / "out"), {}), "acting") for folder in folders]
        assert sorted(calm) == list(range(6))
        assert len({print_["reward"] for print_ in calm.values()}) > 1, "nothing to tell rollouts apart by"
        assert killed == calm

    asyncio.run(compare())
    assert resumed_rollouts(Store.open(str(folders[1] / "out"), {}), "acting")


def run_to_its_end(folder: Path, environ: dict[str, str], kills: int, drawn: random.Random) -> None:
    """Run the job, and kill it this many times, each time after it has written more of its journal."""
    for killed in range(kills + 1):
        process = subprocess.Popen(
            ROLLOUTCTL, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=(folder / "stderr.log").open("ab")
        )
        if killed < kills:
            enough = written(folder) + drawn.randint(4, 14)
            while written(folder) < enough and process.poll() is None:
                time.sleep(0.01)
            assert process.poll() is None, "it was over before it could be killed"
            process.kill()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
    assert json.loads(output)["completed"]


def written(folder: Path) -> int:
    return segments_in(Store.open(str(folder / "out"), {}))
