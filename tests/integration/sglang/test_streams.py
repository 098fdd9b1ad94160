"""Behaviour that only the stand-in can be made to show."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agent_runtime.models.base import ModelConfigError, ModelError
from agent_runtime.models.inference_client import InferenceClient
from rollout_api.inference.description import EngineType
from tests.integration.vllm.test_turns import PICK, request
from tests.support.sglang_server import SglangStandIn

Serve = Callable[..., Awaitable[tuple[SglangStandIn, InferenceClient]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> tuple[SglangStandIn, InferenceClient]:
            server = await stack.enter_async_context(SglangStandIn(**settings))
            client = InferenceClient(
                f"{server.url}/v1", "policy", headers={}, key_origin="", call_seconds=60, engine=EngineType.SGLANG
            )
            stack.push_async_callback(client.close)
            await client.check()
            return server, client

        yield start


async def test_ids_are_the_same_where_each_event_repeats_the_answer(serve: Serve) -> None:
    found = []
    for incremental in (True, False):
        server, client = await serve(incremental=incremental, tokens_per_second=400)
        assert client.token_capture == "Tokens"
        counts: list[int] = []
        reply = await client.complete(request(tokens=50), on_tokens=counts.append)
        assert reply.completion_token_ids == server.served[-1].ids
        assert reply.logprobs == server.served[-1].logprobs
        assert sum(counts) == 50
        found.append(reply.completion_token_ids)
    assert found[0] == found[1]


async def test_aborted_stream_is_continued_with_the_same_ids(serve: Serve) -> None:
    server, client = await serve(tokens_per_second=200)
    whole = await client.complete(request(tokens=80))

    before, server.faults.hold_at = len(server.served), 10
    call = asyncio.create_task(client.complete(request(tokens=80)))
    async with asyncio.timeout(60):
        while len(server.served) == before or len(server.served[-1].ids) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    server.faults.hold_at = None
    server.engine.abort([])
    reply = await call
    assert reply.completion_token_ids == whole.completion_token_ids
    assert len(server.served) == before + 2
    assert server.served[-2].aborted


async def test_answer_without_logprobs_is_an_error_of_the_server(serve: Serve) -> None:
    server, client = await serve()
    server.faults.no_logprobs = True
    with pytest.raises(ModelError, match="NoLogprobs"):
        await client.complete(request())


async def test_tools_without_a_parser_are_refused_with_the_flag(serve: Serve) -> None:
    _, client = await serve(tool_parser=False)
    with pytest.raises(ModelConfigError, match=r"NoToolParser.*--tool-call-parser"):
        await client.complete(request(tools=[PICK]))


async def test_image_is_refused_and_not_dropped(serve: Serve) -> None:
    server, client = await serve()
    before = len(server.served)
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ModelConfigError, match=r"TextModel.*without their image_url"):
        await client.complete(request(messages=[{"role": "user", "content": content}]))
    assert len(server.served) == before


async def test_reasoning_that_the_template_opens_is_separated(serve: Serve) -> None:
    server, client = await serve(reasoning_parser="qwen3")
    server.script = {"s": ["It is 42.</think>42"]}
    pieces: list[str] = []
    asked = request("<think>", extra={"ignore_eos": False}, tokens=60, on_text=pieces.append)
    assert (await client.complete(asked)).text == "It is 42.</think>42"
    server.opens_reasoning = True
    reply = await client.complete(asked)
    assert (reply.text, reply.message["reasoning_content"]) == ("42", "It is 42.")
