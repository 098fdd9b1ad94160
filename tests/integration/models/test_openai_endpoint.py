"""The endpoint against a real server, faults included."""

import asyncio
import datetime
from email.utils import format_datetime
from typing import Any, cast

import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletion, completion_create_params

from agent_runtime.models import http_client
from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelConfigError, ModelError
from rollout_api.model import Sampling

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


async def test_an_answer_keeps_text_usage_and_finish_reason(server: Any, connect: Any, make_request: Any) -> None:
    reply = await connect().complete(make_request())
    assert (reply.text, reply.finish_reason, reply.model) == ("Hello", "stop", "m")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (7, 2, 4)


async def test_request_has_the_declared_openai_form(server: Any, connect: Any, make_request: Any) -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=100, stop=["x"], extra={"user": "u"})
    await connect().complete(make_request(sampling=sampling, tools=[TOOL], max_tokens=40))
    body, headers = server.bodies[0], server.headers[0]
    declared = set(completion_create_params.CompletionCreateParamsNonStreaming.__annotations__)
    declared |= set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert set(body) <= declared
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["stop"]) == (40, 0.5, 0.9, ["x"])
    assert (body["seed"], body["user"], body["tools"]) == (5, "u", [TOOL])
    assert headers["Authorization"] == "Bearer secret-key-of-the-job", (
        "a line break after the key must not reach the header"
    )
    assert headers["X-Session-ID"] == "s"


async def test_fields_left_out_keep_the_servers_own_defaults(server: Any, connect: Any, make_request: Any) -> None:
    await connect().complete(make_request())
    assert set(server.bodies[0]) == {"model", "messages", "seed"}


async def test_openai_package_gets_the_same_results_from_the_same_server(
    server: Any, connect: Any, make_request: Any
) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    server.usual["choices"] = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    ours = await connect().complete(make_request(tools=[TOOL]))
    async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as client:
        theirs: ChatCompletion = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], tools=[cast(Any, TOOL)], seed=5
        )
    understood: dict[str, Any] = theirs.model_dump()
    [their_call] = understood["choices"][0]["message"]["tool_calls"]
    [call] = ours.tool_calls
    assert {"name": call.name, "arguments": call.arguments} == their_call["function"]
    assert call.id == their_call["id"]
    assert ours.usage.prompt_tokens == understood["usage"]["prompt_tokens"]
    assert server.bodies[0] == server.bodies[1], "both clients send the same request"


async def test_token_ids_and_logprobs_are_recorded_where_the_server_offers_them(
    server: Any, connect: Any, make_request: Any
) -> None:
    logprobs = {"content": [{"token": "He", "logprob": -0.1}, {"token": "llo", "logprob": -0.2}]}
    choice = server.usual["choices"][0] | {"token_ids": [11, 12], "logprobs": logprobs}
    server.usual |= {"prompt_token_ids": [1, 2, 3], "choices": [choice]}
    model = connect()
    await model.check()
    assert model.token_capture == "Chat"
    reply = await model.complete(make_request())
    assert server.bodies[-1]["return_token_ids"] is True
    assert server.bodies[-1]["logprobs"] is True
    assert (reply.prompt_token_ids, reply.completion_token_ids) == ([1, 2, 3], [11, 12])
    assert reply.logprobs == [-0.1, -0.2]


async def test_logprobs_that_do_not_match_the_tokens_are_left_out(server: Any, connect: Any, make_request: Any) -> None:
    choice = server.usual["choices"][0] | {"token_ids": [11, 12, 2], "logprobs": {"content": [{"logprob": -0.1}]}}
    server.usual |= {"prompt_token_ids": [1], "choices": [choice]}
    reply = await connect().complete(make_request())
    assert reply.completion_token_ids == [11, 12, 2]
    assert reply.logprobs is None


def strict(*refused: str, field: str = "max_tokens") -> Any:
    """Make the server refuse unknown fields, as OpenAI's own does."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        for name in refused:
            if name in body:
                message = f"Unrecognized request argument supplied: {name}"
                if name == "max_tokens":
                    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
                return web.json_response({"error": {"message": message}}, status=400)
        answer = {"message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        return web.json_response({"choices": [answer]})

    return behave


@pytest.mark.parametrize(
    ("refused", "sent"),
    [
        (["return_token_ids"], {"seed"}),
        (["return_token_ids", "logprobs", "seed"], set()),
        (["return_token_ids", "max_tokens"], {"seed"}),
    ],
)
async def test_a_server_that_refuses_optional_fields_is_still_usable(
    refused: Any, sent: Any, server: Any, connect: Any, make_request: Any
) -> None:
    server.plan(*[strict(*refused)] * 20)
    model = connect()
    await model.check()
    assert model.token_capture == "TextOnly"
    reply = await model.complete(make_request(max_tokens=9))
    assert reply.text == "ok"
    limit = "max_completion_tokens" if "max_tokens" in refused else "max_tokens"
    assert set(server.bodies[-1]) == {"model", "messages", limit} | sent


async def test_a_server_that_refuses_every_request_is_a_config_error_with_its_words(
    server: Any, connect: Any, faults: Any
) -> None:
    server.plan(*[faults["status"](400, {"error": {"message": "no chat template"}})] * 8)
    with pytest.raises(ModelConfigError, match="no chat template"):
        await connect().check()


@pytest.mark.parametrize("code", [408, 409, 425, 429, 500, 503, 529])
async def test_a_transient_failure_costs_no_rollout(
    code: Any, server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](code))
    assert (await connect().complete(make_request())).text == "Hello"
    assert len(server.bodies) == 2


async def test_a_connection_dropped_in_the_middle_of_an_answer_is_tried_again(
    server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["drop"]())
    assert (await connect().complete(make_request())).text == "Hello"


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_obeyed(form: Any, server: Any, connect: Any, make_request: Any, faults: Any) -> None:
    started = datetime.datetime.now(datetime.UTC)
    until = started + datetime.timedelta(seconds=3)
    value = "2" if form == "seconds" else format_datetime(until, usegmt=True)
    server.plan(faults["status"](429, headers={"Retry-After": value}))
    await connect().complete(make_request())
    # An HTTP date has whole seconds, so up to one of the three is cut off.
    assert datetime.datetime.now(datetime.UTC) - started >= datetime.timedelta(seconds=1.9)


async def test_call_is_repeated_before_its_deadline_when_retry_after_is_longer(
    server: Any, connect: Any, make_request: Any, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []
    sleep = asyncio.sleep

    async def skip(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", skip)
    server.plan(faults["status"](429, {"error": {"message": "slow down"}}, {"Retry-After": "3600"}))
    assert (await connect(callSeconds=600).complete(make_request())).text == "Hello"
    assert 0 < max(pauses) <= 540


async def test_hanging_server_is_abandoned_at_the_deadline(server: Any, connect: Any, make_request: Any) -> None:
    server.plan(server.hang)
    with pytest.raises(ModelError, match=r"Timeout.*within 1 s"):
        await connect(callSeconds=1).complete(make_request())
    await asyncio.wait_for(server.disconnected.wait(), 10)


async def test_missing_server_is_unreachable(
    connect: Any, make_request: Any, unused_tcp_port: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last attempt starts after 1.5 s instead of near the end, where it would time out.
    monkeypatch.setattr("agent_runtime.models.http_client.LAST_SHARE", 0.5)
    model = connect(baseURL=f"http://127.0.0.1:{unused_tcp_port}/v1", callSeconds=3)
    with pytest.raises(ModelError, match="Unreachable"):
        await model.complete(make_request())
    with pytest.raises(ModelError, match="Unreachable"):
        await model.check()


async def test_call_to_an_abandoned_server_can_be_repeated_elsewhere(
    server: Any, connect: Any, make_request: Any
) -> None:
    server.plan(server.hang)
    model = connect()
    call = asyncio.create_task(model.complete(make_request()))
    await asyncio.wait_for(server.arrived.wait(), 10)
    await model.close()
    with pytest.raises(ModelError, match=r"Unreachable: .*were closed"):
        await asyncio.wait_for(call, 10)
    assert len(server.bodies) == 1, "it was not retried on connections that nobody would close"


async def test_cancelling_a_call_closes_its_connection_so_the_server_stops_generating(
    server: Any, connect: Any, make_request: Any
) -> None:
    server.plan(server.hang)
    call = asyncio.create_task(connect().complete(make_request()))
    await asyncio.wait_for(server.arrived.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(server.disconnected.wait(), 10)


@pytest.mark.parametrize("code", [401, 403])
async def test_refused_key_is_reported_with_its_origin(
    code: Any, server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](code, {"error": {"message": "Incorrect API key: secret-key-of-the-job"}}))
    with pytest.raises(
        ModelConfigError, match=r"environment variable TEST_KEY.*Incorrect API key: \[API key\]"
    ) as caught:
        await connect().complete(make_request())
    assert "secret" not in str(caught.value), "the message is recorded with the rollout"


async def test_unknown_model_is_reported_with_the_served_ones(server: Any, connect: Any, faults: Any) -> None:
    server.plan(faults["status"](404, {"error": {"message": "The model `x` does not exist."}}))
    with pytest.raises(ModelConfigError, match=r"'x'.*does not exist.*it serves m, other"):
        await connect(name="x").check()


async def test_wrong_path_is_reported_with_advice_to_check_the_base_url(
    server: Any, connect: Any, make_request: Any
) -> None:
    with pytest.raises(ModelConfigError, match="check baseURL"):
        await connect(baseURL=server.url + "/oops").complete(make_request())


async def test_a_redirect_is_not_followed_with_the_key(
    server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](307, headers={"Location": "https://elsewhere.example/v1"}))
    with pytest.raises(ModelConfigError, match=r"redirects to https://elsewhere\.example/v1"):
        await connect().complete(make_request())


CONTEXT_ERRORS = [
    (400, {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}),
    (
        400,
        {
            "object": "error",
            "message": "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens (4000 in "
            "the messages, 100 in the completion). Please reduce the length of the messages or completion.",
            "type": "BadRequestError",
            "code": 400,
        },
    ),
    (
        400,
        {
            "error": {
                "message": "The decoder prompt (length 9) is longer than the maximum model length of 8.",
                "code": 400,
            }
        },
    ),
    (
        400,
        {
            "error": {
                "message": "You passed 4097 input tokens and requested 0 output tokens. However, the model's context "
                "length is only 4096 tokens.",
                "type": "BadRequestError",
            }
        },
    ),
    (
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size, try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 9,
                "n_ctx": 8,
            }
        },
    ),
    (
        500,
        {"error": {"code": 500, "message": "the request exceeds the available context size", "type": "server_error"}},
    ),
    (400, {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}}),
    (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096.", "error_type": "v"}),
]


@pytest.mark.parametrize(("code", "body"), CONTEXT_ERRORS, ids=range(len(CONTEXT_ERRORS)))
async def test_too_long_prompt_counts_against_the_policy(
    code: Any, body: Any, server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](code, body))
    with pytest.raises(ContextExceeded):
        await connect().complete(make_request())
    assert len(server.bodies) == 1, "and never tried again"


async def test_a_prompt_that_fits_is_answered_although_the_limit_of_the_answer_does_not(
    server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    message = (
        "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context length is 4096 tokens "
        "and your request has 200 input tokens (4000 > 4096 - 200)."
    )
    server.plan(faults["status"](400, {"error": {"message": message, "code": 400}}))
    assert (await connect().complete(make_request(max_tokens=4000))).text == "Hello"
    assert [body.get("max_tokens") for body in server.bodies] == [4000, None]


async def test_server_error_without_context_message_is_infrastructure(
    server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](500, {"error": {"message": "CUDA out of memory"}}))
    assert (await connect().complete(make_request())).text == "Hello"


async def test_content_filter_is_distinguished(server: Any, connect: Any, make_request: Any, faults: Any) -> None:
    body = {
        "error": {
            "code": "content_filter",
            "message": "filtered",
            "innererror": {"code": "ResponsibleAIPolicyViolation"},
        }
    }
    server.plan(faults["status"](400, body))
    with pytest.raises(ContentFiltered):
        await connect().complete(make_request())


@pytest.mark.parametrize(
    "body",
    [
        "<html>gateway</html>",
        '{"choices": [',
        {"choices": []},
        {"choices": "x"},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": ["parts"]}}]},
        {"choices": [{"message": {"content": "", "tool_calls": [{"id": "x"}]}}]},
        {"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": "many"}},
    ],
)
async def test_an_answer_of_another_shape_is_a_bad_response(
    body: Any, server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](200, body))
    with pytest.raises(ModelError, match="BadResponse"):
        await connect().complete(make_request())


@pytest.mark.parametrize("error", [{"message": "upstream failed"}, {"code": 502, "message": "Provider returned error"}])
async def test_an_error_with_status_200_is_repeated_as_one_with_its_own_status(
    error: Any, server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    server.plan(faults["status"](200, {"error": error}))
    assert (await connect().complete(make_request())).text


async def test_a_refusal_with_status_200_means_what_it_says(
    server: Any, connect: Any, make_request: Any, faults: Any
) -> None:
    error = {"code": 400, "message": "This model's maximum context length is 10 tokens"}
    server.plan(faults["status"](200, {"error": error}), faults["status"](200, {"error": error}))
    with pytest.raises(ContextExceeded):
        await connect().complete(make_request())


async def test_page_instead_of_a_completion_is_reported_with_the_server(server: Any, connect: Any, faults: Any) -> None:
    server.plan(faults["status"](200, "<html>Welcome to nginx</html>"))
    with pytest.raises(ModelError, match="Welcome to nginx") as caught:
        await connect().check()
    assert server.url in str(caught.value)


async def test_empty_answer_remains_an_answer(server: Any, connect: Any, make_request: Any) -> None:
    server.usual["choices"][0]["message"] = {"role": "assistant", "content": ""}
    reply = await connect().complete(make_request())
    assert (reply.text, reply.tool_calls) == ("", [])


async def test_half_a_character_at_the_token_limit_cannot_break_the_record(
    server: Any, connect: Any, make_request: Any
) -> None:
    server.usual["choices"][0]["message"]["content"] = "whole \U0001f600, half \ud83d"
    assert (await connect().complete(make_request())).text == "whole \U0001f600, half ?"


async def test_decoded_arguments_are_encoded_as_text(server: Any, connect: Any, make_request: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    server.usual["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    [made] = (await connect().complete(make_request())).tool_calls
    assert made.arguments == '{"a": 1}'


async def test_hundreds_of_calls_run_at_once(server: Any, connect: Any, make_request: Any) -> None:
    together = asyncio.Barrier(300)

    async def wait_for_all(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await together.wait()
        return web.json_response(server.usual)

    server.plan(*[wait_for_all] * 300)
    model = connect(callSeconds=60)
    replies = await asyncio.gather(*(model.complete(make_request(turn=turn)) for turn in range(300)))
    assert len(replies) == 300


@pytest.mark.parametrize("streamed", [False, True])
async def test_answer_without_end_is_refused_before_it_fills_the_memory(
    server: Any, connect: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(http_client, "EVENT_BYTES", 1 << 20)

    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65536)

    server.plan(endless)
    with pytest.raises(ModelError, match="sent more than 1 MiB in a"):
        await connect().complete(make_request(on_text=(lambda piece: None) if streamed else None))
