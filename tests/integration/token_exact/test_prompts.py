"""Bare prompts, stop strings and further fields of a request: what reaches the server, and what comes back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent_runtime.models.base import ContextExceeded, ModelRequest, RequestRefused, TokenPrefix
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.token_exact.routes import Progress
from rollout_api.model import Sampling
from tests.integration.token_exact.conftest import Ran
from tests.support.vllm_server import Answer, Request, ToolCall, VllmStandIn, made_by, tokenizer

Connect = Callable[..., Any]
MakeRequest = Callable[..., ModelRequest]
TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}
CAPTURES = pytest.mark.parametrize("scale_out", [True, False], ids=["Tokens", "Chat"])


def last(server: VllmStandIn) -> Request:
    return server.served[-1]


@CAPTURES
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 77, 300, 12]])
async def test_a_bare_prompt_is_recorded_as_the_engine_saw_it(
    prompt: Any, streamed: bool, scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(scale_out=scale_out, tokens_per_second=40 if streamed else 400) as server:
        model = await connect(server)
        pieces: list[str] = []
        request = make_request(sampling=Sampling(max_tokens=40, extra={"ignore_eos": True}))
        request = replace(request, on_text=pieces.append if streamed else None)
        reply = await model.complete_prompt(prompt, request, cache_salt="7")
        truth = last(server)
    assert reply.prompt_token_ids == (tokenizer().encode(prompt) if isinstance(prompt, str) else prompt)
    assert (reply.prompt_token_ids, reply.completion_token_ids) == (truth.prompt_ids, truth.ids)
    assert reply.logprobs == truth.logprobs
    assert (truth.session, truth.cache_salt, len(truth.ids)) == ("s", "7", 40)
    assert (reply.text, reply.finish_reason) == (tokenizer().decode(truth.ids), "length")
    assert reply.usage.completion_tokens == 40
    if streamed:
        assert len(pieces) > 1
        assert "".join(pieces) == reply.text


@CAPTURES
async def test_bare_prompt_without_a_limit_gets_the_remaining_context(
    scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(scale_out=scale_out, max_model_len=400) as server:
        model = await connect(server)
        unlimited = make_request(sampling=Sampling(extra={"ignore_eos": True}))
        reply = await model.complete_prompt([1, 2, 3], unlimited)
        assert len(reply.completion_token_ids or []) == 397
        with pytest.raises(ContextExceeded):
            await model.complete_prompt([1] * 500, unlimited)


async def test_broken_completion_is_continued(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn() as server:
        model = await connect(server)
        server.faults.update({"drop_after": 10, "times": 1})
        request = make_request(sampling=Sampling(max_tokens=30, extra={"ignore_eos": True}))
        progress = Progress()
        with pytest.raises(Exception, match="Interrupted"):
            await model.complete_prompt([1, 2, 3], request, progress=progress)
        assert len(progress.ids) == 10
        reply = await model.complete_prompt([1, 2, 3], request, progress=progress)
    assert reply.completion_token_ids == made_by(0, [1, 2, 3], 30, seed=5, ignore_eos=True)


async def test_a_server_without_ids_still_completes_a_prompt(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn() as server:
        server.faults.no_token_ids = True
        reply = await (await connect(server)).complete_prompt("Once", make_request())
        assert reply.text == tokenizer().decode(last(server).ids)
    assert reply.completion_token_ids is None


STOPPED = "First comes this.\nObservation: and never this"


async def _stopped(
    server: VllmStandIn, model: InferenceClient, request: ModelRequest
) -> tuple[list[str], Any, Request]:
    pieces: list[str] = []
    reply = await model.complete(replace(request, on_text=pieces.append))
    return pieces, reply, last(server)


@pytest.mark.parametrize("stop", [["\nObservation:"], ["Obs"], ["never", "comes"], ["servation: a"]])
@pytest.mark.parametrize("kept", [False, True])
async def test_stop_string_ends_the_text_and_its_sampled_ids_stay(
    stop: list[str], kept: bool, connect: Connect, make_request: MakeRequest
) -> None:
    extra = {"include_stop_str_in_output": True} if kept else {}
    request = make_request(sampling=Sampling(max_tokens=200, stop=stop, extra=extra))
    script = {"s": [STOPPED]}
    async with VllmStandIn(script=script, tokens_per_second=500) as server:
        pieces, exact, truth = await _stopped(server, await connect(server), request)
    async with VllmStandIn(script=script, tokens_per_second=500, scale_out=False) as server:
        _, chat, _ = await _stopped(server, await connect(server), request)
    assert exact.text == chat.text
    assert exact.stop_sequence == chat.stop_sequence == truth.stopped_by
    assert exact.finish_reason == chat.finish_reason == "stop"
    assert "".join(pieces) == exact.text, "also no part of it is streamed"
    assert exact.completion_token_ids == truth.ids
    assert isinstance(truth.stopped_by, str)
    assert truth.stopped_by in tokenizer().decode(truth.ids)


async def test_answers_ended_by_stop_strings_continue_from_every_sampled_id(
    connect: Connect, make_request: MakeRequest
) -> None:
    script = {"s": [STOPPED, STOPPED, STOPPED, "The end."]}
    async with VllmStandIn(script=script) as server:
        model = await connect(server)
        request = make_request(sampling=Sampling(max_tokens=200, stop=["\nObservation:"]))
        for turn in range(4):
            reply = await model.complete(request)
            messages = [*request.messages, reply.message]
            ids = [*(reply.prompt_token_ids or []), *(reply.completion_token_ids or [])]
            assert last(server).prompt_ids[: len(request.prefix.ids if request.prefix else [])] == list(
                request.prefix.ids if request.prefix else []
            ), f"turn {turn} forks"
            said = {"role": "user", "content": f"Observation: {turn}"}
            request = replace(
                request, messages=[*messages, said], prefix=TokenPrefix(len(messages), ids), turn=turn + 1
            )
        text = tokenizer().decode(last(server).prompt_ids, special=True)
    assert text.count("\nObservation:<|im_end|>") == 3, "sampled, so in the context, and the turn is closed behind it"


async def test_closing_token_is_not_part_of_an_answers_text(connect: Connect, make_request: MakeRequest) -> None:
    async with VllmStandIn(script={"s": ["Done.", "", "One two"]}) as server:
        model = await connect(server)
        assert (await model.complete(make_request())).text == "Done."
        empty = await model.complete(make_request(messages=[*make_request().messages, *_turn()]))
        assert (empty.text, empty.completion_token_ids) == ("", [tokenizer().eos])
        two = tokenizer().encode("two")[0]
        ended = make_request(sampling=Sampling(extra={"stop_token_ids": [two]}))
        reply = await model.complete(replace(ended, messages=[*ended.messages, *_turn(), *_turn()]))
        assert two in last(server).stop_token_ids
    assert "<|im_end|>" not in reply.text


def _turn() -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "So."}, {"role": "user", "content": "On."}]


async def test_without_parallel_tool_calls_only_the_first_tool_call_is_returned(
    connect: Connect, make_request: MakeRequest
) -> None:
    answer = Answer("I look.", [ToolCall("bash", {"command": "ls"}), ToolCall("bash", {"command": "pwd"})])
    async with VllmStandIn(script={"s": [answer]}) as server:
        model = await connect(server)
        both = await model.complete(make_request(tools=[TOOL]))
        one = await model.complete(make_request(tools=[TOOL], sampling=Sampling(extra={"parallel_tool_calls": False})))
    assert [call.arguments for call in both.tool_calls] == ['{"command": "ls"}', '{"command": "pwd"}']
    assert [call.arguments for call in one.tool_calls] == ['{"command": "ls"}']
    assert one.completion_token_ids == both.completion_token_ids


async def test_fields_of_the_chat_form_reach_the_engine_as_sampling_parameters(
    connect: Connect, make_request: MakeRequest
) -> None:
    extra = {
        "logit_bias": {"5": 1.5},
        "bad_words": ["no"],
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "n": 1,
    }
    async with VllmStandIn() as server:
        model = await connect(server)
        sampling = Sampling(max_tokens=5, temperature=0.3, top_p=0.9, stop=["!"], extra=extra)
        await model.complete(make_request(sampling=sampling))
        asked = last(server).sampling
        await model.complete_prompt("x", make_request(sampling=sampling))
        of_prompt = last(server).sampling
    for sent in (asked, of_prompt):
        assert {name: sent[name] for name in ("logit_bias", "bad_words", "min_p", "frequency_penalty")} == {
            name: extra[name] for name in ("logit_bias", "bad_words", "min_p", "frequency_penalty")
        }
        assert sent["structured_outputs"] == {"json": {"type": "object"}}
        assert (sent["temperature"], sent["top_p"], sent["stop"], sent["seed"]) == (0.3, 0.9, ["!"], 5)


@pytest.mark.parametrize("extra", [{"n": 2}, {"verbosity": "low"}, {"skip_special_tokens": False}, {"tempreture": 1}])
async def test_a_field_without_effect_is_refused_and_nothing_is_sampled(
    extra: dict[str, Any], connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn() as server:
        model = await connect(server)
        asked = len(server.served)
        [name] = extra
        with pytest.raises(RequestRefused, match=name):
            await model.complete(make_request(sampling=Sampling(extra=extra)))
        with pytest.raises(RequestRefused, match=name):
            await model.complete_prompt("x", make_request(sampling=Sampling(extra=extra)))
        assert len(server.served) == asked


@CAPTURES
@pytest.mark.parametrize("streamed", [False, True])
async def test_request_that_the_engine_refuses_is_an_error_of_the_request(
    streamed: bool, scale_out: bool, connect: Connect, make_request: MakeRequest
) -> None:
    async with VllmStandIn(scale_out=scale_out) as server:
        model = await connect(server)
        request = make_request(sampling=Sampling(extra={"response_format": {"type": "poem"}}))
        request = replace(request, on_text=(lambda piece: None) if streamed else None)
        with pytest.raises(RequestRefused, match="poem"):
            await model.complete(request)
        with pytest.raises(RequestRefused, match="poem"):
            await model.complete_prompt("x", request)


async def test_a_job_whose_sampling_is_refused_says_which_field(run_one: Callable[..., Any], tmp_path: Any) -> None:
    async with VllmStandIn() as server:
        ran: Ran = await run_one(server, tmp_path, sampling={"maxTokens": 10, "extra": {"verbosity": "low"}})
    assert (ran.result["outcome"], ran.result["reason"]) == ("InfraFailed", "BadRequest")
    assert "verbosity" in ran.result["message"]
    assert ran.result.get("reward") is None
