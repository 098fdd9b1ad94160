"""Faults on demand, and refusals like vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.support.vllm_server import Answer, Faults, ToolCall, made_by
from tests.unit.vllm_server.conftest import MESSAGES, TOOLS, Standin, until

GENERATE: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": {"ignore_eos": True, "max_tokens": 100}}


async def test_status_fault_affects_the_given_number_of_requests_with_retry_after(standin: Standin) -> None:
    async with standin(faults=Faults(status=429, retry_after=2, times=2)) as client:
        async with (
            aiohttp.ClientSession(client.server.url) as session,
            session.post("/v1/chat/completions", json={"messages": MESSAGES}) as refused,
        ):
            assert (refused.status, refused.headers["Retry-After"]) == (429, "2")
        assert (await client.post("/inference/v1/generate", GENERATE))[0] == 429
        assert (await client.post("/inference/v1/generate", GENERATE))[0] == 200
        assert len(client.server.served) == 1


async def test_hung_engine_samples_no_token_while_health_is_200(standin: Standin) -> None:
    async with standin(tokens_per_second=1000) as client:
        asked = asyncio.create_task(client.post("/inference/v1/generate", GENERATE))
        await until(lambda: client.server.served and client.server.served[0].ids)
        await client.post("/_standin/faults", {"hang": True})
        made, page = len(client.server.served[0].ids), await client.get("/metrics")
        await asyncio.sleep(0.05)
        await client.get("/health")
        assert (len(client.server.served[0].ids), await client.get("/metrics")) == (made, page)
        await client.post("/_standin/faults", {"hang": False})
        assert len((await asked)[1]["choices"][0]["token_ids"]) == 100


@pytest.mark.parametrize("tokens_per_second", [None, 1000])
async def test_engine_hangs_during_an_answer_on_request(standin: Standin, tokens_per_second: float | None) -> None:
    async with standin(faults=Faults(hang_after=7), tokens_per_second=tokens_per_second) as client:
        asked = asyncio.create_task(client.post("/inference/v1/generate", GENERATE))
        await until(lambda: client.server.faults.hang)
        assert len(client.server.served[0].ids) == 7
        await client.post("/_standin/faults", {"hang": False})
        assert (await asked)[1]["choices"][0]["token_ids"] == made_by(0, [1, 2, 3], 100, ignore_eos=True)


async def test_a_request_is_held_at_so_many_tokens_by_an_engine_that_answers(standin: Standin) -> None:
    async with standin(faults=Faults(hold_at=7), tokens_per_second=1000) as client:
        asked = asyncio.create_task(client.post("/inference/v1/generate", GENERATE))
        await until(lambda: client.server.served and len(client.server.served[0].ids) == 7)
        short = {**GENERATE, "sampling_params": {**GENERATE["sampling_params"], "max_tokens": 5}}
        assert (await client.post("/inference/v1/generate", short))[1]["choices"][0]["finish_reason"] == "length"
        assert len(client.server.served[0].ids) == 7
        await client.post("/_standin/faults", {"hold_at": None})
        assert (await asked)[1]["choices"][0]["token_ids"] == made_by(0, [1, 2, 3], 100, ignore_eos=True)


@pytest.mark.parametrize("tokens_per_second", [None, 1000])
async def test_stream_is_cut_after_the_given_number_of_tokens(
    standin: Standin, tokens_per_second: float | None
) -> None:
    async with standin(faults=Faults(drop_after=7, times=1), tokens_per_second=tokens_per_second) as client:
        got: list[int] = []

        async def read() -> None:
            async for event in client.events("/inference/v1/generate", {**GENERATE, "stream": True}):
                got.extend(event["choices"][0]["token_ids"])

        with pytest.raises(aiohttp.ClientError):
            await read()
        assert got == made_by(0, [1, 2, 3], 7, ignore_eos=True)
        rest = {"token_ids": [1, 2, 3, *got], "sampling_params": {"ignore_eos": True, "max_tokens": 93}}
        _, answer = await client.post("/inference/v1/generate", rest)
        assert got + answer["choices"][0]["token_ids"] == made_by(0, [1, 2, 3], 100, ignore_eos=True)


async def test_an_answer_is_cut_without_streaming_too(standin: Standin) -> None:
    async with standin(faults=Faults(drop_after=7, times=1)) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.post("/inference/v1/generate", GENERATE)
        assert client.server.served[0].disconnected


async def test_restart_closes_connections_and_restores_the_base_weights(standin: Standin) -> None:
    async with standin(tokens_per_second=100) as client:
        client.server.weights.version = 5
        asked = asyncio.create_task(client.post("/inference/v1/generate", GENERATE))
        await until(lambda: client.server.served and client.server.served[0].ids)
        url = client.server.url
        await client.server.restart()
        with pytest.raises(aiohttp.ClientError):
            await asked
        assert client.server.url == url
        assert await client.get("/_standin/state") | {"tokens": 0} == {
            "version": 0,
            "label": "default",
            "updating": False,
            "loads": [],
            "adapters": {},
            "paused": None,
            "running": 0,
            "waiting": 0,
            "tokens": 0,
            "orphan_tokens": 0,
            "boots": 2,
        }
        assert set(client.server.served[0].versions) == {5}


async def test_logprobs_and_ids_can_be_left_out(standin: Standin) -> None:
    async with standin(faults=Faults(no_logprobs=True, no_token_ids=True)) as client:
        answer = await client.chat(logprobs=True, return_token_ids=True)
        assert answer["choices"][0]["logprobs"] is None
        assert answer["prompt_token_ids"] is answer["choices"][0]["token_ids"] is None


async def test_a_cut_tool_call_is_text(standin: Standin) -> None:
    script = {"*": [Answer("Look.", [ToolCall("bash", {"command": "ls -la /tmp"})])]}
    async with standin(script=script, faults=Faults(cut_tool_call=True)) as client:
        choice = (await client.chat(tools=TOOLS))["choices"][0]
        assert choice["message"]["tool_calls"] == []
        assert '"name": "bash"' in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "path", "body", "status", "words"),
    [
        ({}, "/v1/chat/completions", {"model": "x", "messages": MESSAGES}, 404, "The model `x` does not exist."),
        (
            {"tool_parser": False},
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": TOOLS},
            400,
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        ),
        (
            {},
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "policy is not a multimodal model",
        ),
        (
            {"max_model_len": 50},
            "/v1/completions",
            {"prompt": [1] * 41, "max_tokens": 10},
            400,
            "This model's maximum context length is 50 tokens. However, you requested 10 output tokens and your prompt "
            "contains at least 41 input tokens, for a total of at least 51 tokens.",
        ),
        (
            {"max_model_len": 50},
            "/inference/v1/generate",
            {"token_ids": [1] * 51, "sampling_params": {}},
            400,
            "The decoder prompt (length 51) is longer than the maximum model length of 50.",
        ),
        ({}, "/inference/v1/generate", {"token_ids": [10**6], "sampling_params": {}}, 400, "out of vocabulary"),
        (
            {"priority_scheduling": False},
            "/inference/v1/generate",
            {**GENERATE, "priority": 1},
            400,
            "Got priority 1 but Priority scheduling is not enabled.",
        ),
        ({"scale_out": False}, "/inference/v1/generate", GENERATE, 403, "--enable-scale-out"),
        ({"weight_checker": False}, "/weight_checker", {"action": "checksum"}, 404, "Not Found"),
        ({"scale_out": False}, "/v1/chat/completions/render", {"messages": MESSAGES}, 403, "--enable-scale-out"),
        ({}, "/v1/chat/completions/derender", {"generate_response": {"choices": []}}, 400, "chat_request is required"),
        ({}, "/v1/chat/completions", [], 400, "must be a JSON object"),
    ],
)
async def test_requests_that_vllm_refuses_get_its_message(
    standin: Standin, options: dict[str, Any], path: str, body: Any, status: int, words: str
) -> None:
    async with standin(**options) as client:
        got, answer = await client.post(path, body)
        assert (got, answer["error"]["code"]) == (status, status)
        assert words in answer["error"]["message"]


async def test_data_routes_need_the_key_and_control_routes_do_not(standin: Standin) -> None:
    async with standin(api_key="secret") as client:
        assert await client.post("/inference/v1/generate", GENERATE) == (401, {"error": "Unauthorized"})
        assert (await client.post("/inference/v1/generate", GENERATE, Authorization="Bearer secret"))[0] == 200
        assert (await client.post("/pause"))[0] == 200


async def test_unknown_fault_is_refused_by_name(standin: Standin) -> None:
    async with standin() as client:
        status, answer = await client.post("/_standin/faults", {"flood": True})
        assert (status, "flood" in answer["error"]["message"]) == (400, True)
