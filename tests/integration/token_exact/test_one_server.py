"""Single calls: which routes are used, where an answer continues, what arrives during it, and the error of each
failure.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from agent_runtime.models.base import (
    ContextExceeded,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
    TokenPrefix,
)
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.token_exact.routes import Progress
from rollout_api.model import Sampling
from rollout_api.records import Message
from tests.support.vllm_server import Answer, Faults, Prompt, Request, ToolCall, VllmStandIn, made_by

Connect = Callable[..., Any]
MakeRequest = Callable[..., ModelRequest]
TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}
LONG = " ".join(f"Sentence number {n} of a rather long answer." for n in range(40))


def last(server: VllmStandIn) -> Request:
    return server.served[-1]


def next_turn(request: ModelRequest, reply: ModelReply, said: str = "And now?", **changes: Any) -> ModelRequest:
    """Return the request that continues after an answer."""
    messages: list[Message] = [*request.messages, reply.message]
    ids = [*(reply.prompt_token_ids or []), *(reply.completion_token_ids or [])]
    fields = {name: getattr(request, name) for name in ("tools", "sampling", "seed", "session", "task", "member")}
    return ModelRequest(
        **fields
        | {
            "messages": [*messages, {"role": "user", "content": said}],
            "turn": request.turn + 1,
            "prefix": TokenPrefix(len(messages), ids),
        }
        | changes
    )


@pytest.mark.parametrize(
    ("settings", "faults", "capture"),
    [
        ({}, {}, "Tokens"),
        ({"scale_out": False}, {}, "Chat"),
        ({}, {"no_token_ids": True}, "TextOnly"),
        ({"scale_out": False}, {"no_logprobs": True}, "TextOnly"),
        ({}, {"no_logprobs": True}, "TextOnly"),
    ],
)
async def test_the_most_exact_capture_that_the_server_offers_is_chosen(
    settings: Any, faults: Any, capture: str, connect: Connect
) -> None:
    async with VllmStandIn(**settings, faults=Faults(**faults)) as server:
        assert (await connect(server)).token_capture == capture


async def test_server_without_exact_tokens_gives_the_reason(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    async with VllmStandIn(scale_out=False) as server:
        await connect(server)
    assert "/v1/chat/completions/render is disabled; start vLLM with --enable-scale-out" in caplog.text
    assert "API key" not in caplog.text


async def test_an_answer_has_the_ids_and_logprobs_that_the_server_sampled(
    connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn() as server:
        reply = await (await connect(server)).complete(make_request(sampling=Sampling(max_tokens=50)), cache_salt="7")
        truth = last(server)
    assert (reply.prompt_token_ids, reply.completion_token_ids) == (truth.prompt_ids, truth.ids)
    assert reply.logprobs == truth.logprobs
    assert (truth.session, truth.cache_salt) == ("s", "7")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(truth.prompt_ids), len(truth.ids))
    assert reply.policy_spans == [], "which version it was is not the server's to say"


@pytest.mark.parametrize("max_tokens", [3, 4000])
async def test_next_prompt_extends_the_previous_ids_after_a_cut_off_answer(
    max_tokens: int, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(script={"s": [LONG, "Short."]}) as server:
        model = await connect(server)
        first = make_request(sampling=Sampling(max_tokens=max_tokens))
        reply = await model.complete(first)
        await model.complete(next_turn(first, reply))
        before, after = server.served_in("s")
    seen = [*before.prompt_ids, *before.ids]
    assert after.prompt_ids[: len(seen)] == seen
    assert reply.finish_reason == ("length" if max_tokens == 3 else "stop")
    said = f"{reply.text}<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    assert Prompt(after.prompt_ids, "s").text.endswith(said), "closed once, whether the model did it or not"


async def test_ids_that_differ_from_the_messages_are_not_continued(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn(script={"s": [LONG, "Short."]}) as server:
        model = await connect(server)
        first = make_request()
        reply = await model.complete(first)
        request = next_turn(first, reply)
        messages = [{"role": "user", "content": "Something else altogether"}, *request.messages[1:]]
        forked = await model.complete(next_turn(first, reply, messages=messages))
        truth = last(server)
    assert request.prefix is not None
    assert truth.prompt_ids[: len(request.prefix.ids)] != list(request.prefix.ids)
    assert forked.prompt_token_ids == truth.prompt_ids, "recorded as what it was"
    assert "Something else altogether" in Prompt(truth.prompt_ids, "s").text


@pytest.mark.parametrize("given", [True, False])
async def test_broken_answer_is_continued_without_sampling_a_token_twice(
    given: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn() as server:
        model = await connect(server)
        request = make_request(sampling=Sampling(max_tokens=60, extra={"ignore_eos": True}))
        server.faults.update({"drop_after": 10, "times": 1})
        arrived: list[int] = []
        if given:
            progress = Progress()
            with pytest.raises(ModelError, match="Interrupted"):
                await model.complete(request, progress=progress, on_tokens=arrived.append)
            assert len(progress.ids) == sum(arrived) == len(progress.logprobs) == 10
            reply = await model.complete(request, progress=progress, on_tokens=arrived.append)
        else:
            reply = await model.complete(request, on_tokens=arrived.append)
        first, second = server.served_in("s")
    assert second.prompt_ids == [*first.prompt_ids, *(reply.completion_token_ids or [])[:10]]
    assert len(reply.completion_token_ids or []) == sum(arrived) == 60
    assert reply.prompt_token_ids == first.prompt_ids
    assert reply.completion_token_ids == made_by(0, first.prompt_ids, 60, seed=5, ignore_eos=True)


STRUCTURED = json.dumps({"reason": "two and two", "answer": 4})


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_with_a_grammar_that_broke_off_starts_over(
    streamed: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(script={"s": [STRUCTURED]}, tokens_per_second=None if streamed else 20) as server:
        model = await connect(server)
        sampling = Sampling(max_tokens=200, extra={"response_format": {"type": "json_object"}})
        server.faults.update({"drop_after": 10, "times": 1})
        request = make_request(sampling=sampling)
        if streamed:
            pieces, reply = await pieces_of(model, request)
            assert "".join(pieces) == STRUCTURED
        else:
            reply = await model.complete(request)
        first, second = server.served_in("s")
    assert reply.text == STRUCTURED
    assert (second.prompt_ids, second.ids) == (first.prompt_ids, reply.completion_token_ids)
    assert reply.logprobs == second.logprobs
    # Ten tokens were lost. The pause after them is at most half a second.
    assert streamed or request.health.lost_seconds > 0.7


async def test_an_answer_with_a_grammar_that_a_client_has_begun_to_read_fails(
    connect: Connect, make_request: MakeRequest
) -> None:
    long = json.dumps({"lines": [f"line {number}" for number in range(40)]}, indent=1)
    async with VllmStandIn(script={"s": [long]}, tokens_per_second=200) as server:
        model = await connect(server)
        server.faults.update({"drop_after": 60, "times": 1})
        sampling = Sampling(max_tokens=2000, extra={"response_format": {"type": "json_object"}})
        with pytest.raises(ModelError, match="Interrupted"):
            await pieces_of(model, make_request(sampling=sampling))


async def abort_once(server: VllmStandIn) -> None:
    """Abort the first answer in the middle, as a weight update may."""
    while not any(len(request.ids) > 10 for request in server.engine.running):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with ClientSession() as http:
        await http.post(f"{server.url}/abort_requests", json={})


@pytest.mark.parametrize("form", ["chat", "prompt"])
async def test_aborted_answer_of_a_server_without_token_routes_is_discarded(
    form: str, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(scale_out=False, tokens_per_second=100) as server:
        model = await connect(server)
        request = make_request(sampling=Sampling(max_tokens=60, extra={"ignore_eos": True}))
        aborting = asyncio.create_task(abort_once(server))
        reply = await (model.complete(request) if form == "chat" else model.complete_prompt("Count.", request))
        await aborting
        first, second = server.served_in("s")
    assert (first.finish, second.finish, reply.finish_reason) == ("abort", "length", "length")
    assert reply.completion_token_ids == second.ids
    assert request.health.lost_seconds > 0


async def test_answer_that_the_server_aborts_fails_while_a_client_reads_it(
    connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(scale_out=False, tokens_per_second=100) as server:
        model = await connect(server)
        aborting = asyncio.create_task(abort_once(server))
        with pytest.raises(ModelError, match="Interrupted"):
            await pieces_of(model, make_request(sampling=Sampling(max_tokens=60, extra={"ignore_eos": True})))
        await aborting


async def test_request_continues_at_another_server_of_the_model_without_a_new_check(
    connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn() as one, VllmStandIn() as other:
        request = make_request(sampling=Sampling(max_tokens=40, extra={"ignore_eos": True}))
        model = await connect(one)
        one.faults.update({"drop_after": 7})
        progress = Progress()
        with pytest.raises(ModelError, match="Interrupted"):
            await model.complete(request, progress=progress)
        second = await connect(other, check=False)
        second.token_capture = model.token_capture
        reply = await second.complete(request, progress=progress)
    assert reply.completion_token_ids == made_by(0, reply.prompt_token_ids or [], 40, seed=5, ignore_eos=True)


async def test_versions_that_a_server_reports_are_recorded_for_each_token(
    connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(weight_versions=True, tokens_per_second=200) as server, ClientSession() as http:
        model = await connect(server)
        request = make_request(sampling=Sampling(max_tokens=120, extra={"ignore_eos": True}))
        unnamed = await model.complete(request)
        server.weights.version, server.weights.label = 7, "7"
        begun = asyncio.Event()
        call = asyncio.create_task(model.complete(request, on_tokens=lambda count: begun.set()))
        await begun.wait()
        await http.post(f"{server.url}/pause?mode=keep")
        server.weights.version, server.weights.label = 8, "8"
        await http.post(f"{server.url}/resume")
        reply = await call
        truth = last(server)
    assert unnamed.policy_spans == [], "nobody has given these weights a version"
    told = [span.version for span in reply.policy_spans for _ in range(span.tokens)]
    assert told == [str(version) for version in truth.versions]
    assert {"7", "8"} == set(told)


async def test_tokens_whose_weights_a_broken_stream_did_not_name_have_no_version(
    connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(weight_versions=True) as server:
        model = await connect(server)
        server.weights.version, server.weights.label = 7, "7"
        server.faults.update({"drop_after": 10, "times": 1})
        reply = await model.complete(make_request(sampling=Sampling(max_tokens=60, extra={"ignore_eos": True})))
    assert [(span.tokens, span.version) for span in reply.policy_spans] == [(10, None), (50, "7")]


async def pieces_of(model: InferenceClient, request: ModelRequest) -> tuple[list[str], ModelReply]:
    pieces: list[str] = []
    reply = await model.complete(ModelRequest(**{**_fields(request), "on_text": pieces.append}))
    return pieces, reply


def _fields(request: ModelRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__slots__}


@pytest.mark.parametrize("scale_out", [True, False])
async def test_plain_text_arrives_piece_by_piece_and_is_the_whole_text_in_the_end(
    scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(script={"s": [LONG]}, scale_out=scale_out, tokens_per_second=2000) as server:
        pieces, reply = await pieces_of(await connect(server), make_request(sampling=Sampling(max_tokens=4000)))
    assert len(pieces) > 1
    assert "".join(pieces) == reply.text == LONG


@pytest.mark.parametrize("scale_out", [True, False])
async def test_text_of_a_tool_call_is_not_streamed(
    scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    answer = Answer(f"{LONG}\n", [ToolCall("bash", {"command": "echo " + "x" * 300})])
    async with VllmStandIn(script={"s": [answer]}, scale_out=scale_out, tokens_per_second=2000) as server:
        request, arrived = make_request(tools=[TOOL], sampling=Sampling(max_tokens=4000)), list[int]()
        request.health.on_tokens = arrived.append
        pieces, reply = await pieces_of(await connect(server), request)
        truth = last(server)
    assert "".join(pieces) == reply.text
    assert reply.text.strip() == LONG
    assert sum(arrived) == (len(truth.ids) if scale_out else 0), "tokens of held back text count, too"
    assert (len(pieces) > 1) == scale_out, "a streamed chat with tools would lose ids"
    assert reply.finish_reason == "tool_calls"
    assert [call.name for call in reply.tool_calls] == ["bash"]
    assert reply.completion_token_ids == truth.ids


@pytest.mark.parametrize("scale_out", [True, False])
async def test_a_prompt_over_the_context_is_context_exceeded(
    scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(max_model_len=300, scale_out=scale_out) as server:
        model = await connect(server)
        with pytest.raises(ContextExceeded):
            await model.complete(make_request("word " * 400))


async def test_stored_ids_over_the_context_are_context_exceeded(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn(script={"s": [LONG, "Short."]}) as server:
        first = make_request(sampling=Sampling(max_tokens=4000))
        reply = await (await connect(server)).complete(first)
        request = next_turn(first, reply)
        # Words split into pieces need more tokens than the rendered text.
        server.max_model_len = len(reply.prompt_token_ids or []) + len(reply.completion_token_ids or [])
        model = await connect(server)
        with pytest.raises(ContextExceeded, match=f"the model's context is {server.max_model_len}"):
            await model.complete(request)


async def test_aborting_pause_is_continued_at_the_same_token(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn(tokens_per_second=200) as server:
        model = await connect(server)
        request = make_request(sampling=Sampling(max_tokens=100, extra={"ignore_eos": True}))
        arrived = asyncio.Event()
        call = asyncio.create_task(model.complete(request, on_tokens=lambda count: arrived.set()))
        await arrived.wait()
        await abort_all(server)
        reply = await call
        requests = server.served_in("s")
    assert len(requests) > 1
    assert reply.completion_token_ids == made_by(0, requests[0].prompt_ids, 100, seed=5, ignore_eos=True)


async def abort_all(server: VllmStandIn) -> None:
    async with ClientSession() as session, session.post(f"{server.url}/abort_requests", json={}) as response:
        assert response.status == 200


async def test_cancelling_a_call_ends_the_generation(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn(tokens_per_second=50) as server:
        model = await connect(server)
        arrived = asyncio.Event()
        call = asyncio.create_task(
            model.complete(
                make_request(sampling=Sampling(max_tokens=4000, extra={"ignore_eos": True})),
                on_tokens=lambda count: arrived.set(),
            )
        )
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(last(server).done(), 120)
        assert last(server).disconnected


async def test_hanging_server_is_abandoned_at_the_deadline(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn() as server:
        capture = (await connect(server)).token_capture
        model = await connect(server, check=False, seconds=1)
        model.token_capture = capture
        server.faults.hang = True
        with pytest.raises(ModelError, match="Timeout") as failure:
            await model.complete(make_request())
        assert not failure.value.after_tokens


async def test_answer_over_the_time_limit_counts_as_begun(connect: Connect, make_request: MakeRequest) -> None:
    """Otherwise the policy could have its rollout masked by an endless first answer."""
    async with VllmStandIn(tokens_per_second=50) as server:
        model = await connect(server, seconds=2)
        with pytest.raises(ModelError, match="Timeout") as failure:
            await model.complete(make_request(sampling=Sampling(max_tokens=4000, extra={"ignore_eos": True})))
        assert failure.value.after_tokens


async def test_busy_server_is_asked_again(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn() as server:
        model = await connect(server)
        server.faults.update({"status": 503, "times": 2})
        request = make_request()
        assert (await model.complete(request)).completion_token_ids
        assert request.health.lost_seconds > 0
        server.faults.update({"status": 429, "times": 1})
        with pytest.raises(ModelError, match="RateLimited"):
            await model.complete(make_request(), progress=Progress())


async def test_wrong_key_is_reported_with_its_origin(connect: Connect) -> None:
    async with VllmStandIn(api_key="right") as server:
        with pytest.raises(ModelConfigError, match=r"KeyRefused.*Secret model-key"):
            await connect(server, headers={"Authorization": "Bearer wrong"}, key_origin="key k of Secret model-key")
        with pytest.raises(ModelConfigError, match=r"no API key was sent .*Set model\.endpoint\.apiKeyFrom"):
            await connect(server)
        model = await connect(server, headers={"Authorization": "Bearer right"})
        assert model.token_capture == "Tokens"


async def test_unknown_model_is_reported_with_the_served_ones(connect: Connect) -> None:
    async with VllmStandIn(model="policy") as server:
        with pytest.raises(ModelConfigError, match=r"'polciy'.*it serves policy"):
            await connect(server, name="polciy")


async def test_endpoint_with_another_protocol_is_reported(connect: Connect) -> None:
    async def page(http: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with VllmStandIn() as server:
            with pytest.raises(ModelError, match="BadResponse"):
                await connect(server, base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("scale_out", [True, False])
async def test_an_image_to_a_text_model_is_a_config_error(
    scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with VllmStandIn(scale_out=scale_out) as server:
        model = await connect(server)
        with pytest.raises(ModelConfigError, match=r"TextModel.*accepts only text"):
            await model.complete(make_request(messages=[{"role": "user", "content": [image]}]))


@pytest.mark.parametrize("scale_out", [True, False])
async def test_tools_without_a_parser_are_a_config_error(
    scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(scale_out=scale_out, tool_parser=False) as server:
        model = await connect(server)
        with pytest.raises(ModelConfigError, match=r"NoToolParser.*--tool-call-parser"):
            await model.complete(make_request(tools=[TOOL]))


async def test_ids_that_lose_their_logprobs_are_an_error_and_not_recorded(
    connect: Connect, make_request: MakeRequest
) -> None:
    for scale_out in (True, False):
        async with VllmStandIn(scale_out=scale_out) as server:
            model = await connect(server)
            server.faults.no_logprobs = True
            with pytest.raises(ModelError, match="NoLogprobs"):
                await model.complete(make_request())
