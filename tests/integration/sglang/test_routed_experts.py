"""Routed experts for router replay, on SGLang itself with a mixture of experts and on its stand-in, with the assertions for
vLLM.
"""

import asyncio
from collections.abc import Iterator

import pytest

from agent_runtime.models.inference_client import InferenceClient
from tests.integration.sglang.conftest import BOTH, SglangServer, started_with
from tests.integration.vllm.test_routed_experts import (  # noqa: F401
    model,
    test_each_turn_adds_the_rows_of_its_new_tokens,
    test_job_records_the_experts_of_whole_sequences,
    test_rows_that_were_lost_with_a_stream_are_left_out,
    test_server_with_other_experts_than_expected_is_refused,
)
from tests.integration.vllm.test_turns import request

FAST = 5000
"""Tokens a second of the stand-in after the update."""


@pytest.fixture(scope="module", params=BOTH)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with started_with(("--enable-return-routed-experts",), request, tmp_path_factory, experts=True) as server:
        yield server


async def test_rows_of_tokens_before_an_update_are_left_out(
    server: SglangServer,
    model: InferenceClient,  # noqa: F811 a fixture
) -> None:
    """SGLang computes them again with the new weights, so its rows are not those that chose these tokens."""
    begun = asyncio.Event()
    call = asyncio.create_task(model.complete(request(tokens=server.long_answer), on_tokens=lambda count: begun.set()))
    await begun.wait()
    await server.pause()
    await server.load(server.checkpoint(1))
    await server.name_weights("1")
    await server.resume()
    await server.set_speed(FAST)
    reply = await call
    first, second = reply.policy_spans
    assert (first.version, second.version) == ("0", "1")
    prompt = len(reply.prompt_token_ids or [])
    assert reply.routed_experts is not None
    assert reply.routed_experts.spans == [
        (0, prompt - 1),
        (prompt + first.tokens - 1, prompt + first.tokens + second.tokens - 1),
    ]
