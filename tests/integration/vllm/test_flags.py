"""vLLM and its stand-in with other flags than a ModelServer's: without the token routes, with a reasoning parser."""

from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime.models.answers import reasoning_of
from agent_runtime.models.base import ModelConfigError, ModelRequest
from agent_runtime.models.http_client import CallOptions, JsonClient
from agent_runtime.models.vllm.token_routes import VllmRoutes
from rollout_api.model import Sampling
from tests.integration.vllm.conftest import (
    ASK_SECONDS,
    BOTH,
    MODEL,
    PLAIN_FLAGS,
    InferenceServer,
    client_of,
    started_with,
)
from tests.integration.vllm.test_contract import BASH, HELLO
from tests.support.vllm_server import tokenizer

OPENED = {"role": "assistant", "content": "<think>\nLet me"}
CONTINUED = {"messages": [HELLO, OPENED], "add_generation_prompt": False, "continue_final_message": True}
"""A chat whose prompt ends within the reasoning."""


@pytest.fixture(scope="module", params=BOTH)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    """A server without --enable-scale-out and without a parser."""
    with started_with(PLAIN_FLAGS, request.param, tmp_path_factory, "--no-scale-out") as server:
        yield server


@pytest.fixture(scope="module", params=BOTH)
def reasoning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    flags = (*PLAIN_FLAGS, "--enable-scale-out", "--reasoning-parser", "hf")
    with started_with(flags, request.param, tmp_path_factory) as server:
        yield server


@pytest.mark.parametrize(
    "path",
    [
        "/inference/v1/generate",
        *(f"/v1/{form}/{way}" for form in ("chat/completions", "completions") for way in ("render", "derender")),
    ],
)
async def test_token_routes_are_forbidden_without_scale_out(plain: InferenceServer, path: str) -> None:
    status, answer = await plain.ask("POST", path, {"model": MODEL})
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (403, "PermissionDeniedError", 403)
    assert "--enable-scale-out" in answer["error"]["message"]


async def test_client_names_the_missing_flag(plain: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(plain.url) as client:
        assert client.token_capture == "Chat"
    route = f"{plain.url}/v1/chat/completions/render"
    assert f"{route} is disabled; start vLLM with --enable-scale-out" in caplog.text
    assert "API key" not in caplog.text


async def test_client_names_the_flags_of_the_missing_tool_parser(plain: InferenceServer) -> None:
    async with client_of(plain.url) as client:
        with pytest.raises(ModelConfigError, match=r"NoToolParser.*--tool-call-parser"):
            await client.complete(ModelRequest([HELLO], [BASH], Sampling(), 1, "s", "t", 0, 1))


@pytest.mark.parametrize(("chat", "is_open"), [({"messages": [HELLO]}, False), (CONTINUED, True)])
async def test_answer_to_a_prompt_that_opens_reasoning_begins_with_it(
    chat: dict[str, Any], is_open: bool, reasoning: InferenceServer
) -> None:
    client = JsonClient(reasoning.url, {}, "")
    routes, options = VllmRoutes(client, MODEL), CallOptions(ASK_SECONDS)
    chat = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **chat}
    direct = await reasoning.post("/v1/chat/completions", {**chat, "return_token_ids": True})
    (choice,) = direct["choices"]
    prompt = list((await routes.render(chat, options)).ids)
    assert prompt == direct["prompt_token_ids"]
    same = await routes.derender(chat, prompt, choice["token_ids"], "length", options)
    ended = tokenizer().encode("It is 42.\n</think>\n\n42<|im_end|>")
    split = await routes.derender(chat, prompt, ended, "stop", options)
    await client.close()
    assert (reasoning_of(same.message), same.text) == (
        choice["message"]["reasoning"] or "",
        choice["message"]["content"] or "",
    )
    assert bool(reasoning_of(same.message)) == is_open
    expected = ("It is 42.\n", "\n\n42") if is_open else ("", "It is 42.\n</think>\n\n42")
    assert (reasoning_of(split.message), split.text) == expected
