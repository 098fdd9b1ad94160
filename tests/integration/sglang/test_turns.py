"""Calls of our own client, token by token, on SGLang itself and on its stand-in, with the assertions for vLLM."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from agent_runtime.models.base import RequestRefused
from agent_runtime.models.inference_client import InferenceClient
from tests.integration.sglang.conftest import SglangServer
from tests.integration.vllm.conftest import MAX_NUM_SEQS
from tests.integration.vllm.recorder import Recorder, extends
from tests.integration.vllm.test_turns import (  # noqa: F401
    PICK,
    next_turn,
    request,
    test_answer_names_the_version_that_the_server_reports,
    test_bare_prompt_is_completed_by_the_sampled_ids,
    test_broken_stream_continues_with_the_same_ids,
    test_call_that_straddles_a_load_names_both_versions,
    test_cancelled_call_ends_its_request_at_the_server,
    test_load_reader_sees_progress_and_waiting_calls,
    test_next_turn_finds_its_prefix_in_the_cache_of_its_salt,
    test_six_turns_are_one_sequence_of_sampled_ids,
    test_special_token_in_an_answer_is_in_its_text_and_breaks_no_sequence,
    test_stop_string_ends_the_text_and_remains_in_the_ids,
    test_streamed_text_is_the_text_of_the_answer,
    test_structured_answer_starts_over_after_a_broken_stream,
)

CALL = r'<tool_call>\n\{"name": "pick", "arguments": \{"colour":  ?"(red|green)"\}\}\n</tool_call>'
"""A call as a grammar makes a random model write it, with white space that rendering does not reproduce."""


async def test_tool_calls_of_eight_turns_are_one_sequence(
    server: SglangServer, model: InferenceClient, recorder: Recorder
) -> None:
    if not server.real:
        call = {"name": "pick", "arguments": {"colour": "red"}}
        await server.post("/_standin/script", {"s": [{"tool_calls": [call]}] * 8})
    asked = request(tokens=400, temperature=1.0, tools=[PICK], extra={"regex": CALL, "ignore_eos": False})
    for turn in range(8):
        reply = await model.complete(asked)
        (made,) = reply.tool_calls
        assert (made.name, reply.finish_reason) == ("pick", "tool_calls")
        assert json.loads(made.arguments)["colour"] in ("red", "green")
        asked = next_turn(asked, reply, {"role": "tool", "tool_call_id": made.id, "content": f"picked {turn}"})
    answers = recorder.of("s")
    assert len(answers) == 8
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(answers))


async def test_waiting_calls_with_lower_priority_numbers_are_answered_first(
    server: SglangServer, model: InferenceClient
) -> None:
    """SGLang admits calls that wait for the end of a pause in an order of its own, so they are not in the queue yet."""
    order: list[int] = []

    async def ask(priority: int) -> None:
        await model.complete(request(f"Number {priority}", tokens=10), priority=priority)
        order.append(priority)

    long = [request(f"Long {number}", tokens=7000) for number in range(MAX_NUM_SEQS)]
    first = [asyncio.create_task(model.complete(one, priority=-1000)) for one in long]
    async with asyncio.timeout(60):
        while await server.running() != MAX_NUM_SEQS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        calls = [asyncio.create_task(ask(priority)) for priority in range(0, -2 * MAX_NUM_SEQS, -1)]
        while await server.metric("sglang:num_queue_reqs") != len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for call in first:
        call.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    await asyncio.gather(*calls)
    # Those that run side by side end in any order.
    assert sorted(order[:MAX_NUM_SEQS]) == list(range(-2 * MAX_NUM_SEQS + 1, -MAX_NUM_SEQS + 1))


@pytest.mark.parametrize("extra", [{"tool_choice": "required"}, {"temprature": 1}, {"n": 2}])
async def test_field_without_effect_is_refused_by_name(model: InferenceClient, extra: dict[str, object]) -> None:
    (name,) = extra
    with pytest.raises(RequestRefused, match=f"{name}: .* has no effect on SGLang's token routes"):
        await model.complete(request(extra=extra))


async def test_chat_completions_are_captured_where_token_routes_are_missing(
    server: SglangServer, model: InferenceClient, recorder: Recorder
) -> None:
    recorder.hidden = frozenset({"/generate"})
    await model.check()
    assert model.token_capture == "Chat"
    pieces: list[str] = []
    asked = replace(request(), on_text=pieces.append)
    reply = await model.complete(asked)
    assert reply.prompt_token_ids == (await server.render(*asked.messages))["token_ids"]
    assert len(reply.completion_token_ids or ()) == len(reply.logprobs or ()) == 12
    assert "".join(pieces) == reply.text
