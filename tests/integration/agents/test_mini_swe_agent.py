"""The real mini-swe-agent from PyPI is the agent; its runners are killed while it works."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.export.formats import Format, export
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.mini_swe_agent import COMMAND, DONE, ENVIRONMENT, REQUIREMENTS, STEPS, TURNS, VERSION, working
from tests.support.own_environment import own_environment, run_killed
from tests.support.talking_program import exported, one_conversation
from tests.support.vllm_server import Answer, Prompt, VllmStandIn

pytestmark = pytest.mark.full

KILLED_IN = (1, 3)
"""Turns of rollout 0 in whose answer its runner dies."""


def manifest(server: VllmStandIn) -> dict[str, Any]:
    checks = [f'test "$(cat steps.txt | xargs)" = "{" ".join(map(str, range(STEPS)))}"']
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "mini"},
        "spec": {
            "tasks": {"inline": [{"name": "count", "prompt": "Count in steps.txt.", "verifier": {"commands": checks}}]},
            "groupSize": 2,
            "model": {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy"}},
            "agent": {"type": "Command", "command": COMMAND, "trajectory": {"path": "mini.traj.json"}},
            "sandbox": {"env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()]},
            "attempts": {"limit": 1},
            "output": {"uri": "out"},
        },
    }


async def test_mini_swe_agent_continues_when_its_runners_are_killed(tmp_path: Path) -> None:
    to_kill, begun = list(KILLED_IN), asyncio.Event()

    def script(prompt: Prompt) -> Answer | None:
        if prompt.session.endswith("rollout-0-0") and to_kill and prompt.turn == to_kill[0]:
            del to_kill[0]
            server.faults.hang_after = 3
            begun.set()
        return working(prompt)

    async with VllmStandIn(script=script) as server:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest(server)))
        environment = own_environment("mini-swe-agent", *REQUIREMENTS)

        def mend() -> None:
            server.faults.hang, server.faults.hang_after = False, None
            server.engine.look()

        folder = await run_killed(tmp_path, environment, begun, mend)
        served = {index: server.served_in(f"rollout-{index}-0") for index in range(2)}
    assert not to_kill, "the runner was killed in each of these turns"
    run = await open_run(Store.open(str(tmp_path / "out"), {}), folder)
    for result in run.results():
        end = result.outcome, result.stop_reason, result.reward, result.turns, result.attempt
        assert end == ("Completed", "Finished", 1, TURNS, 0), result
        (branch,) = await run.tokens(result.index)
        assert exported(branch) == one_conversation(served[result.index])
    lines = [json.loads(line) async for line in export(run, Format.PROGRAM_ATIF)]
    assert len(lines) == 2
    for line in lines:
        assert (line["schema_version"], line["agent"]["name"], line["agent"]["version"]) == (
            "ATIF-v1.7",
            "mini-swe-agent",
            VERSION,
        )
        commands = [call["arguments"]["command"] for step in line["steps"] for call in step.get("tool_calls", [])]
        assert commands == [*(f"echo {number} >> steps.txt" for number in range(STEPS)), DONE]
        answered = [step for step in line["steps"] if "tool_calls" in step and "observation" in step]
        assert len(answered) == STEPS, "each command but the one that hands in has its result"
        assert line["extra"]["exit_status"] == "Submitted"
