"""Real coding agents from npm and PyPI fix a bug without a network while their runner is killed."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from agent_runtime.agents.catalog import CATALOG
from agent_runtime.export.formats import Format, export
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import CATALOG_AGENTS
from tests.support.coding_agents import LAST_WORDS, agent_environment, answer, is_main, manifest, turn_of, turns
from tests.support.coding_agents import steps as steps_of
from tests.support.own_environment import run_killed
from tests.support.talking_program import check_tokens
from tests.support.vllm_server import Answer, Prompt, VllmStandIn

pytestmark = pytest.mark.full


@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", CATALOG_AGENTS)
async def test_agent_fixes_a_bug_and_every_token_is_recorded_once_when_its_runner_is_killed(
    agent: str, tmp_path: Path
) -> None:
    killed, begun = False, asyncio.Event()
    script_of_agent = turns(agent)

    def script(prompt: Prompt) -> Answer | str | None:
        nonlocal killed
        if not prompt.session:
            return None
        if not killed and is_main(agent, prompt) and turn_of(agent, prompt) == len(script_of_agent) // 2:
            killed = True
            server.faults.hang_after = 3
            begun.set()
        return answer(agent, prompt)

    environment = await asyncio.to_thread(agent_environment)
    async with VllmStandIn(script=script, max_model_len=400_000) as server:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest(agent, server.url, environment)))

        def mend() -> None:
            server.faults.hang, server.faults.hang_after = False, None
            server.engine.look()

        folder = await run_killed(tmp_path, environment, begun, mend)
        served = server.served_in("rollout-0-0")
    run = await open_run(Store.open(str(tmp_path / "out"), {}), folder)
    (result,) = run.results()
    assert killed, result.message
    end = result.outcome, result.stop_reason, result.reward, result.attempt
    assert end == ("Completed", "Finished", 1, 0), result
    assert result.turns >= len(script_of_agent)
    check_tokens(served, await run.tokens(0))
    lines = [json.loads(line) async for line in export(run, Format.PROGRAM_ATIF)]
    if CATALOG[agent].trajectory is None:
        assert not lines
        return
    assert lines[0]["schema_version"] in ("ATIF-v1.7", "ATIF-v1.8")  # Terminus' own file has 1.8
    assert lines[0]["agent"]["version"] in (CATALOG[agent].package.version, "unknown")  # some files do not have it
    steps = [step for step in lines[0]["steps"] if step["source"] == "agent"]
    assert steps[-1]["message"].removeprefix("Analysis: ").strip() == LAST_WORDS
    assert [len(step.get("tool_calls", [])) for step in steps] == [len(step.tool_calls) for step in steps_of(agent)]
    if agent == "Terminus":
        # The terminal's text belongs to all keystrokes of a turn.
        assert all(step["observation"]["results"][0]["content"] for step in steps)
        return
    for step in steps[:-1]:
        answered = [result["source_call_id"] for result in step["observation"]["results"]]
        assert answered == [call["tool_call_id"] for call in step["tool_calls"]]
