"""Messages of the history must be acceptable to the server."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.answers import answer_message
from agent_runtime.models.base import ModelReply
from agent_runtime.models.providers.openai_endpoint import parse_completion


def reply(*calls: Any, **message: Any) -> Any:
    message = {"role": "assistant", "content": None, "tool_calls": list(calls)} | message
    return parse_completion({"choices": [{"message": message}]})


def test_repeated_answer_equals_the_recorded_one_so_that_no_branch_is_recorded() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
    answered = reply(call, reasoning_content="hm", refusal=None, annotations=None)
    assert answer_message(answered) is answered.message
    assert answered.message == {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}


def test_empty_fields_that_servers_refuse_in_a_request_are_dropped() -> None:
    assert reply(content="x", function_call=None, tool_calls=[]).message == {"role": "assistant", "content": "x"}


@given(st.text(), st.none() | st.just("id-1") | st.integers())
def test_arguments_are_always_an_object_and_ids_always_match_the_calls(arguments: Any, call_id: Any) -> None:
    answered = reply({"id": call_id, "function": {"name": "f", "arguments": arguments}})
    [sent] = answer_message(answered)["tool_calls"]
    assert isinstance(json.loads(sent["function"]["arguments"]), dict)
    assert sent["id"] == answered.tool_calls[0].id
    assert isinstance(sent["id"], str)
    assert answered.tool_calls[0].arguments == arguments, "the record keeps what the model wrote"


def test_malformed_arguments_are_kept_for_the_model_to_see() -> None:
    [sent] = answer_message(reply({"id": "a", "function": {"name": "f", "arguments": '{"x": '}}))["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"malformed_arguments": '{"x": '}


def test_id_other_than_text_becomes_text() -> None:
    loose = ModelReply({"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": 6}}]}, "tool_calls")
    assert (loose.tool_calls[0].id, loose.tool_calls[0].name) == ("5", "6")
    assert answer_message(loose)["tool_calls"][0]["id"] == "5"


def test_incomplete_reply_of_a_function_is_completed_for_the_next_request() -> None:
    loose = ModelReply({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls")
    [sent] = answer_message(loose)["tool_calls"]
    assert sent == {"id": loose.tool_calls[0].id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
