"""The coding agents of the catalog on vLLM itself. The model answers noise, for which some agents send the request
again.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import CATALOG_AGENTS
from tests.integration.vllm.conftest import ENVIRONMENT, FLAGS, MODEL, InferenceServer, serving
from tests.integration.vllm.recorder import Recorder
from tests.support.coding_agents import agent_environment, manifest
from tests.support.own_environment import run_killed
from tests.support.ports import free_port
from tests.support.talking_program import check_answers
from tests.support.vllm_environment import installed_vllm_python, write_tiny_llama

pytestmark = pytest.mark.full

CONTEXT_TOKENS = 65_536
"""More tokens than the agents' own prompts and tools have with the tiny tokenizer."""


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    """vLLM with a context window for agents."""
    folder = tmp_path_factory.mktemp("vLLM")
    write_tiny_llama(folder, 0)
    port = free_port()
    server = InferenceServer(True, f"http://127.0.0.1:{port}", folder, log=folder / "log")
    long = (
        *("--max-model-len", str(CONTEXT_TOKENS)),
        *("--hf-overrides", f'{{"max_position_embeddings": {CONTEXT_TOKENS}}}'),
        # On a CPU, vLLM ends when it samples with a seed after a prompt that was computed in chunks (0.32,
        # gpu_model_runner.py: a generator of a CPU has no offset).
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT_TOKENS)),
    )
    program = [str(installed_vllm_python().parent / "vllm"), "serve", server.checkpoint(0)]
    with serving(server, [*program, *FLAGS, *long, "--port", str(port)], ENVIRONMENT):
        yield server


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", CATALOG_AGENTS)
async def test_sampled_tokens_of_a_coding_agent_are_recorded_once(
    agent: str, long_server: InferenceServer, tmp_path: Path
) -> None:
    environment = await asyncio.to_thread(agent_environment)
    async with Recorder(long_server.url).serve() as recorder:
        job = manifest(
            agent,
            recorder.url,
            environment,
            model={"endpoint": {"baseURL": f"{recorder.url}/v1", "name": MODEL, "callSeconds": 600}},
            sampling={"temperature": 1.0, "maxTokens": 24},
        )
        job["spec"]["agent"]["maxTurns"] = 4
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        folder = await run_killed(tmp_path, environment, asyncio.Event(), lambda: None)
    run = await open_run(Store.open(str(tmp_path / "out"), {}), folder)
    (result,) = run.results()
    assert (result.outcome, result.token_capture) == ("Completed", "Tokens"), result
    answers = recorder.of("rollout-0-0")
    assert len(answers) == result.turns > 0
    check_answers(answers, await run.tokens(0))
