"""Inference servers that send something other than tokens: each answer is refused with the reason and the server's URL."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web

from agent_runtime.models import http_client
from agent_runtime.models.answers import LEAST_LOGPROB, answered
from agent_runtime.models.base import ModelError, ModelReply, ModelRequest
from agent_runtime.models.inference_client import InferenceClient
from rollout_api.model import Sampling
from tests.support.model_requests import model_request
from tests.support.sglang_server.server import SglangStandIn
from tests.support.vllm_server import VllmStandIn

Event = dict[str, Any]
Send = Callable[[web.StreamResponse], Any]

STAND_INS: dict[str, Callable[[], VllmStandIn]] = {
    "/inference/v1/generate": lambda: VllmStandIn(weight_versions=True),
    "/generate": SglangStandIn,
    "/v1/chat/completions": lambda: VllmStandIn(scale_out=False, drops_streamed_ids=False),
}
"""A healthy server by the route that samples."""
ROUTES = pytest.mark.parametrize("route", STAND_INS)
EXACT_ROUTES = pytest.mark.parametrize("route", [route for route in STAND_INS if "chat" not in route])
LIMIT = 20


def piece(route: str, ids: Sequence[Any], logprobs: Sequence[float] = (), end: str = "", **said: Any) -> Event:
    """Return an event with new ids. Without `logprobs`, each has -1."""
    values = logprobs or [-1.0] * len(ids)
    if route == "/generate":
        known = [[value, token, None] for value, token in zip(values, ids, strict=True)]
        told = {"completion_tokens": len(ids), "output_token_logprobs": known}
        return {"output_ids": ids, "meta_info": told | {"finish_reason": {"type": end} if end else None} | said}
    content = [{"token": "x", "logprob": value} for value in values]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": end or None} | said
    return {"prompt_token_ids": [1, 2], "choices": [choice | {"delta": {"content": "x"}}]}


def events(*whole: Event | bytes, forever: Event | None = None) -> Send:
    async def send(response: web.StreamResponse) -> None:
        for event in whole:
            await response.write(event if isinstance(event, bytes) else b"data: %b\n\n" % json.dumps(event).encode())
        while forever is not None:
            await response.write(b"data: %b\n\n" % json.dumps(forever).encode() * 50)
        await response.write(b"data: [DONE]\n\n")

    return send


@asynccontextmanager
async def hostile(route: str, send: Send, kind: str = "text/event-stream") -> AsyncIterator[InferenceClient]:
    """Open a model whose server passes its check and then answers calls with `send`."""
    is_checked = False
    async with STAND_INS[route]() as healthy, ClientSession(healthy.url) as behind:

        async def answer(request: web.Request) -> web.StreamResponse:
            if is_checked and request.path == route:
                response = web.StreamResponse(headers={"Content-Type": kind})
                await response.prepare(request)
                await send(response)
                return response
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with behind.request(request.method, request.path, data=body, headers=headers) as found:
                return web.Response(status=found.status, body=await found.read(), content_type=found.content_type)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        model = InferenceClient(url, "policy", headers={}, key_origin="", call_seconds=60)
        try:
            await model.check()
            assert model.token_capture == ("Chat" if "chat" in route else "Tokens")
            is_checked = True
            yield model
        finally:
            await model.close()
            await runner.cleanup()


def request() -> ModelRequest:
    return model_request(sampling=Sampling(max_tokens=LIMIT), on_text=lambda text: None)


async def refusal(route: str, send: Send, kind: str = "text/event-stream") -> ModelError:
    async with hostile(route, send, kind) as model:
        with pytest.raises(ModelError) as raised:
            await answered(model.complete(request()))
    assert "127.0.0.1" in raised.value.message
    return raised.value


async def reply(route: str, send: Send) -> ModelReply:
    async with hostile(route, send) as model:
        return await answered(model.complete(request()))


@ROUTES
async def test_page_instead_of_a_stream_is_quoted_immediately(route: str) -> None:
    error = await refusal(route, events(b"<html>maintenance</html>"), "text/html")
    assert (error.reason, "maintenance" in error.message) == ("BadResponse", True)


@ROUTES
async def test_half_an_event_is_a_bad_response(route: str) -> None:
    error = await refusal(route, events(b'data: {"choices": [\n\n'))
    assert (error.reason, "not JSON" in error.message) == ("BadResponse", True)


@ROUTES
async def test_unexpected_event_is_reported_with_the_server(route: str) -> None:
    error = await refusal(route, events({"choices": [5], "meta_info": 5}))
    assert error.reason == "BadResponse"


@ROUTES
@pytest.mark.parametrize("logprob", [math.nan, math.inf, 0.5])
async def test_logprob_that_is_no_number_is_a_bad_response(route: str, logprob: float) -> None:
    error = await refusal(route, events(piece(route, [5, 6], [-1.0, logprob], "stop")))
    assert (error.reason, f"a logprob is {logprob}" in error.message) == ("BadResponse", True)


@ROUTES
async def test_logprob_of_an_impossible_token_is_kept_as_a_number(route: str) -> None:
    answer = await reply(route, events(piece(route, [5, 6], [-1.0, -math.inf], "stop")))
    assert (answer.completion_token_ids, answer.logprobs) == ([5, 6], [-1.0, LEAST_LOGPROB])


@ROUTES
@pytest.mark.parametrize("token", ["5", 1.7, -5, 1 << 70, None, [5]])
async def test_invalid_token_id_is_a_bad_response(route: str, token: Any) -> None:
    error = await refusal(route, events(piece(route, [token, 6], end="stop")))
    assert (error.reason, "a token id is" in error.message) == ("BadResponse", True)


@EXACT_ROUTES
async def test_tokens_without_end_are_refused_soon_after_the_limit(route: str) -> None:
    async def send(response: web.StreamResponse) -> None:
        count = 0
        while True:
            count += 50
            said: dict[str, Any] = {"completion_tokens": count} if route == "/generate" else {}
            await response.write(b"data: %b\n\n" % json.dumps(piece(route, [5] * 50, **said)).encode())

    error = await refusal(route, send)
    assert (error.reason, f"at most {LIMIT} tokens" in error.message) == ("BadResponse", True)


async def test_chat_stream_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES", 1 << 20)
    error = await refusal("/v1/chat/completions", events(forever=piece("/v1/chat/completions", [5])))
    assert (error.reason, "more than 1 MiB" in error.message) == ("BadResponse", True)


@pytest.mark.parametrize(("received", "count"), [(0, 5), (0, 2), (3, 1)])
async def test_ids_that_do_not_match_their_count_are_not_recorded(received: int, count: int) -> None:
    first = [piece("/generate", [1] * received)] if received else []
    last = piece("/generate", [5, 6, 7], end="stop", completion_tokens=count)
    error = await refusal("/generate", events(*first, last))
    assert (error.reason, "output_ids: expected" in error.message) == ("BadResponse", True)


async def test_repeated_ids_that_have_changed_are_not_recorded() -> None:
    error = await refusal("/generate", events(piece("/generate", [5, 6]), piece("/generate", [5, 9, 7], end="stop")))
    assert error.reason == "BadResponse"


async def test_last_id_that_sglang_repeats_for_an_aborted_call_is_not_recorded() -> None:
    """SGLang, srt/managers/tokenizer_manager.py: _handle_abort_req, merged with pieces that waited."""
    answers = iter(
        [
            events(piece("/generate", [5]), piece("/generate", [6, 7, 7], end="abort", completion_tokens=3)),
            events(piece("/generate", [8, 9], end="stop")),
        ]
    )
    answer = await reply("/generate", lambda response: next(answers)(response))
    assert answer.completion_token_ids == [5, 8, 9]


@EXACT_ROUTES
async def test_version_that_moves_back_is_recorded_as_the_server_reports_it(route: str) -> None:
    ranges = [{"version": "3", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    answer = await reply(route, events(piece(route, [5, 6], end="stop", weight_versions=ranges)))
    assert [(span.version, span.tokens) for span in answer.policy_spans] == [("3", 1), ("2", 1)]


@ROUTES
async def test_call_at_a_hostile_server_does_not_affect_the_others(route: str) -> None:
    """Of two calls of the same client, one gets a page and the other one its tokens."""
    sends = iter([events(b"<html>"), events(piece(route, [5, 6], end="stop"))])
    async with hostile(route, lambda response: next(sends)(response)) as model:
        ended = await asyncio.gather(*(model.complete(request()) for _ in range(2)), return_exceptions=True)
    [page] = [end for end in ended if isinstance(end, ModelError)]
    [good] = [end for end in ended if isinstance(end, ModelReply)]
    assert ("<html>" in page.message, good.completion_token_ids) == (True, [5, 6])
