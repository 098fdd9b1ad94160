"""Real coding agents that end with an exit code other than 0: the result has the code and what the agent printed."""

import asyncio
from pathlib import Path

import pytest
import yaml

from agent_runtime.agents.catalog import CATALOG
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import Result
from rollout_api.rollout_job import CATALOG_AGENTS
from tests.support.coding_agents import agent_environment, answer, is_main, manifest
from tests.support.own_environment import run_killed
from tests.support.vllm_server import Answer, Prompt, VllmStandIn

pytestmark = pytest.mark.full

WRONG_ARGUMENTS = {
    "ClaudeCode": (1, "unknown option '--no-such-option'"),
    "Codex": (2, "unexpected argument '--no-such-option'"),
    "QwenCode": (1, "Show help"),
    "Pi": (1, "Unknown option: --no-such-option"),
    "OpenCode": (1, "auto-approve permissions"),
    "GeminiCLI": (1, "Show help"),
    "MiniSWEAgent": (2, "No such option"),
    "Aider": (2, "unrecognized arguments: --no-such-option"),
    "OpenHands": (2, "unrecognized arguments: --no-such-option"),
    "Terminus": (2, "No such option"),
}
"""Exit code, and text that the agent prints. Some print only their options at the end."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("agent", CATALOG_AGENTS)
async def test_wrong_arguments_end_with_the_documented_code_and_what_the_agent_printed(
    agent: str, tmp_path: Path
) -> None:
    result = await run_refused(agent, tmp_path, ["--no-such-option"])
    code, printed = WRONG_ARGUMENTS[agent]
    assert (result.outcome, result.stop_reason, result.turns) == ("Completed", "AgentError", 0), result
    assert code in CATALOG[agent].exit_codes
    assert f"exit code {code}" in result.message
    assert printed in result.message


@pytest.mark.timeout(300)
@pytest.mark.parametrize("agent", CATALOG_AGENTS)
async def test_refused_call_ends_with_the_documented_code_and_what_the_agent_printed(
    agent: str, tmp_path: Path
) -> None:
    result = await run_refused(agent, tmp_path, [])
    assert 1 in CATALOG[agent].exit_codes
    end = "Finished" if agent == "Aider" else "AgentError"  # Aider's exit code is 0
    assert (result.outcome, result.stop_reason, result.turns > 0) == ("Completed", end, True), result
    assert ("exit code 1:" in result.message) == (end == "AgentError"), result.message
    assert "fault on demand" in " ".join(result.message.split()), result.message


async def run_refused(agent: str, folder: Path, arguments: list[str]) -> Result:
    """Return the result of one rollout, whose agent has these arguments. Its model refuses all its calls after the first."""
    environment = await asyncio.to_thread(agent_environment)

    def script(prompt: Prompt) -> Answer | str | None:
        if not prompt.session:
            return None
        if is_main(agent, prompt):
            # A server that refuses a short test request too gives no result.
            server.faults.status, server.faults.longer_than = 400, 100
        return answer(agent, prompt)

    async with VllmStandIn(script=script, max_model_len=400_000) as server:
        job = manifest(agent, server.url, environment)
        job["spec"]["agent"]["config"].setdefault("arguments", []).extend(arguments)
        # mini-swe-agent asks ten times, for minutes.
        job["spec"]["sandbox"]["env"].append({"name": "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "value": "1"})
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        ended = await run_killed(folder, environment, asyncio.Event(), lambda: None)
    run = await open_run(Store.open(str(folder / "out"), {}), ended)
    (result,) = run.results()
    return result
