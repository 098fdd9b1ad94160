"""Calls of our own client, token by token, on vLLM itself and on its stand-in."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from agent_runtime.models.base import ModelReply, ModelRequest, TokenPrefix
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.pool.server import LoadReader
from rollout_api.model import Sampling
from rollout_api.records import Message, PolicySpan
from tests.integration.vllm.conftest import MAX_NUM_SEQS, InferenceServer
from tests.integration.vllm.recorder import Recorder, extends
from tests.support.model_requests import model_request
from tests.support.tiny_llama import MAX_MODEL_LEN
from tests.support.vllm_server import tokenizer

SHAPE = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "digits": {"type": "string", "pattern": "^[0-9]{40}$"}},
    "required": ["colour", "digits"],
    "additionalProperties": False,
}
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "strict": True,
        "description": "Picks a colour.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def request(content: str = "Say what 6 times 7 is.", tokens: int = 12, **changes: Any) -> ModelRequest:
    extra = {"ignore_eos": True, **changes.pop("extra", {})}
    sampling = Sampling(temperature=changes.pop("temperature", 0.0), max_tokens=tokens, extra=extra)
    return model_request(content, sampling=sampling, **changes)


def next_turn(before: ModelRequest, reply: ModelReply, said: Message | None = None) -> ModelRequest:
    """The request that continues after an answer."""
    messages = [*before.messages, reply.message]
    ids = [*(reply.prompt_token_ids or ()), *(reply.completion_token_ids or ())]
    experts = 0 if reply.routed_experts is None else reply.routed_experts.spans[-1][1]
    return model_request(
        messages=[*messages, said or {"role": "user", "content": "And now?"}],
        tools=before.tools,
        sampling=before.sampling,
        turn=before.turn + 1,
        prefix=TokenPrefix(len(messages), ids, experts),
    )


async def greedy(server: InferenceServer, reply: ModelReply) -> list[int]:
    """The ids that the server itself samples after the reply's prompt."""
    assert reply.prompt_token_ids is not None
    assert reply.completion_token_ids is not None
    return await server.greedy(reply.prompt_token_ids, len(reply.completion_token_ids))


# --- Turns ---


async def test_six_turns_are_one_sequence_of_sampled_ids(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    assert model.token_capture == "Tokens"
    asked = request()
    for _ in range(6):
        reply = await model.complete(asked)
        assert reply.completion_token_ids == await greedy(server, reply)
        assert len(reply.logprobs or ()) == 12
        asked = next_turn(asked, reply)
    answers = recorder.of("s")
    assert len(answers) == 6
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(answers))


async def test_streamed_text_is_the_text_of_the_answer(model: InferenceClient) -> None:
    whole = await model.complete(request(tokens=60))
    pieces: list[str] = []
    streamed = await model.complete(request(tokens=60, on_text=pieces.append))
    assert streamed.completion_token_ids == whole.completion_token_ids
    assert "".join(pieces) == streamed.text == whole.text


async def test_stop_string_ends_the_text_and_remains_in_the_ids(model: InferenceClient, recorder: Recorder) -> None:
    whole = await model.complete(request(tokens=40))
    words = [word for word in whole.text.split() if word.isascii() and len(word) > 2]
    stop = words[len(words) // 2]
    asked = request(tokens=40, extra={"stop": [stop]})
    reply = await model.complete(asked)
    assert (reply.finish_reason, reply.stop_sequence) == ("stop", stop)
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert stop in tokenizer().decode(reply.completion_token_ids or [])
    await model.complete(next_turn(asked, reply))
    answers = recorder.of("s")
    assert extends(answers[2], answers[1])


async def test_special_token_in_an_answer_is_in_its_text_and_breaks_no_sequence(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    """The random model samples one if its logit is raised. The stand-in ignores that, and uses a script."""
    word = "<|im_start|>"
    special = tokenizer().special_ids[word]
    if not server.real:
        await server.post("/_standin/script", {"s": [f"first{word}second"] * 3})
    asked = request(tokens=40, temperature=1.0, extra={"logit_bias": {str(special): 4.0}, "seed": 1})
    texts = []
    for _ in range(3):
        reply = await model.complete(asked)
        texts.append(reply.text)
        asked = next_turn(asked, reply)
    answers = recorder.of("s")
    assert special in answers[0].ids[:-1]
    assert [text.count(word) for text in texts] == [answer.ids.count(special) for answer in answers]
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(answers))


async def test_bare_prompt_is_completed_by_the_sampled_ids(server: InferenceServer, model: InferenceClient) -> None:
    reply = await model.complete_prompt("The model reads", request())
    assert reply.prompt_token_ids == tokenizer().encode("The model reads")
    assert reply.completion_token_ids == await greedy(server, reply)
    assert reply.text == tokenizer().decode(reply.completion_token_ids or [])


async def test_tool_calls_of_eight_turns_are_one_sequence(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    """A grammar makes vLLM's random model write a call, with white space, so that rendering the call again gives other
    ids. The stand-in has no grammars and uses a script.
    """
    if not server.real:
        call = {"name": "pick", "arguments": {"colour": "red"}}
        await server.post("/_standin/script", {"s": [{"tool_calls": [call]}] * 8})
    choice = {"type": "function", "function": {"name": "pick"}}
    asked = request(tokens=400, temperature=1.0, tools=[PICK], extra={"tool_choice": choice, "ignore_eos": False})
    for turn in range(8):
        reply = await model.complete(asked)
        (made,) = reply.tool_calls
        assert (made.name, reply.finish_reason) == ("pick", "tool_calls")
        assert json.loads(made.arguments)["colour"] in ("red", "green")
        result = {"role": "tool", "tool_call_id": made.id, "content": f"picked {turn}"}
        asked = next_turn(asked, reply, result)
    answers = recorder.of("s")
    assert len(answers) == 8
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(answers))


# --- Broken streams ---


async def test_broken_stream_continues_with_the_same_ids(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    recorder.cut_after = 10
    reply = await model.complete(request(tokens=40))
    assert reply.completion_token_ids == await greedy(server, reply)
    assert len(reply.completion_token_ids) == len(reply.logprobs or ()) == 40
    first, second = recorder.of("s")
    received = len(second.prompt_ids) - len(first.prompt_ids)
    assert 0 < received < 40
    assert second.prompt_ids == [*first.prompt_ids, *first.ids[:received]]


async def test_structured_answer_starts_over_after_a_broken_stream(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE}}
    fields: dict[str, Any] = {"tokens": 200, "extra": {"response_format": form, "ignore_eos": False}}
    whole = await model.complete(request(**fields))
    recorder.cut_after = 8
    reply = await model.complete(request(**fields))
    assert reply.completion_token_ids == whole.completion_token_ids
    assert [one.prompt_ids for one in recorder.of("s")] == [whole.prompt_token_ids] * 3
    if server.real:
        answer = json.loads(reply.text)
        assert answer["colour"] in ("red", "green")
        assert len(answer["digits"]) == 40


async def test_cancelled_call_ends_its_request_at_the_server(server: InferenceServer, model: InferenceClient) -> None:
    arrived = asyncio.Event()
    asked = request(tokens=MAX_MODEL_LEN - 200)
    call = asyncio.create_task(model.complete(asked, on_tokens=lambda count: arrived.set()))
    await arrived.wait()
    assert await server.running() == 1
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(60):
        while await server.running():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# --- Policy versions ---


async def test_answer_names_the_version_that_the_server_reports(
    server: InferenceServer, model: InferenceClient
) -> None:
    await server.name_weights("41")
    reply = await model.complete(request())
    assert reply.policy_spans == [PolicySpan(tokens=12, version="41")]


async def test_call_that_straddles_a_load_names_both_versions(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    count, enough = 0, asyncio.Event()

    def arrived(tokens: int) -> None:
        nonlocal count
        count += tokens
        if count >= 20:
            enough.set()

    call = asyncio.create_task(model.complete(request(tokens=600), on_tokens=arrived))
    await enough.wait()
    await server.pause()
    await server.load(server.checkpoint(1))
    await server.name_weights("1")
    await server.resume()
    reply = await call
    first, second = reply.policy_spans
    assert (first.version, second.version, first.tokens + second.tokens) == ("0", "1", 600)
    assert recorder.of("s")[0].versions() == ["0"] * first.tokens + ["1"] * second.tokens
    await server.load(server.checkpoint(0))
    assert reply.prompt_token_ids is not None
    again = await server.greedy(reply.prompt_token_ids, 600)
    assert (reply.completion_token_ids or [])[: first.tokens] == again[: first.tokens]


# --- Cache, priority, load ---


async def test_next_turn_finds_its_prefix_in_the_cache_of_its_salt(model: InferenceClient) -> None:
    asked = request("word " * 400)
    reply = await model.complete(asked, cache_salt="3")
    assert reply.usage.cached_tokens == 0
    following = next_turn(asked, reply)
    assert (await model.complete(following, cache_salt="4")).usage.cached_tokens == 0
    second = await model.complete(following, cache_salt="3")
    assert 200 < (second.usage.cached_tokens or 0) < (second.usage.prompt_tokens or 0)


@pytest.mark.parametrize(("query", "kept"), [("mode=keep&clear_cache=false", True), ("mode=keep", False)])
async def test_pause_clears_the_prefix_cache_unless_asked_not_to(
    server: InferenceServer, model: InferenceClient, query: str, kept: bool
) -> None:
    asked = request("word " * 400)
    await model.complete(asked)
    await server.post(f"/pause?{query}")
    await server.post("/resume")
    again = await model.complete(asked)
    assert ((again.usage.cached_tokens or 0) > 200) is kept


async def test_calls_with_lower_priority_numbers_are_answered_first(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    order: list[int] = []

    async def ask(priority: int) -> None:
        await model.complete(request(f"Number {priority}", tokens=30), priority=priority)
        order.append(priority)

    await server.pause()
    calls = [asyncio.create_task(ask(priority)) for priority in range(0, -3 * MAX_NUM_SEQS, -1)]
    async with asyncio.timeout(60):
        while len(recorder.of("s")) < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(1)  # They are in the engine's queue, of which a paused engine reports nothing.
    await server.resume()
    await asyncio.gather(*calls)
    # Those that run side by side end in any order.
    assert sorted(order[:MAX_NUM_SEQS]) == sorted(range(-3 * MAX_NUM_SEQS + 1, -2 * MAX_NUM_SEQS + 1))


async def test_load_reader_sees_progress_and_waiting_calls(server: InferenceServer, model: InferenceClient) -> None:
    reader = LoadReader()
    before = await reader.read(server.url)
    await model.complete(request())
    after = await reader.read(server.url)
    assert before is not None
    assert after is not None
    assert after.progress > before.progress
    calls = [
        asyncio.create_task(model.complete(request(f"Number {number}", tokens=3000)))
        for number in range(MAX_NUM_SEQS + 3)
    ]
    async with asyncio.timeout(60):
        while (load := await reader.read(server.url)) is None or load.pressure.waiting != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await reader.close()


async def test_paused_engine_reports_no_further_waiting_calls(server: InferenceServer, recorder: Recorder) -> None:
    """The engine reports the metrics of its last step."""
    ids = (await server.render({"role": "user", "content": "Hi"}))["token_ids"]
    await server.greedy(ids)
    await server.pause()
    calls = [asyncio.create_task(server.greedy(ids)) for _ in range(3)]
    await asyncio.sleep(1)
    waiting = await server.metric("vllm:num_requests_waiting")
    await server.resume()
    await asyncio.gather(*calls)
    assert waiting == 0
