"""A streamed chat completion gives the same record as a complete one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.base import AnswerAborted, ModelError
from agent_runtime.models.chat_parts import ChatParts
from agent_runtime.models.providers.openai_endpoint import parse_completion

pieces = st.lists(
    st.fixed_dictionaries(
        {"content": st.text(max_size=3), "reasoning_content": st.none() | st.text(max_size=3), "ids": st.integers(0, 3)}
    ),
    min_size=1,
    max_size=6,
)


@given(pieces)
def test_ids_logprobs_and_texts_are_collected_in_order(parts: list[dict[str, Any]]) -> None:
    taken, seen = ChatParts(), []
    taken.add({"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2], "model": "m"})
    for number, part in enumerate(parts):
        choice = {
            "delta": {"content": part["content"], "reasoning_content": part["reasoning_content"]},
            "token_ids": list(range(part["ids"])),
            "logprobs": {"content": [{"logprob": -1.0}] * part["ids"]},
            "finish_reason": "stop" if number == len(parts) - 1 else None,
        }
        seen.append(taken.add({"choices": [choice]}))
    taken.add({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}})
    reply = parse_completion(taken.payload())
    assert reply.text == "".join(seen) == "".join(part["content"] for part in parts)
    ids = [token for part in parts for token in range(part["ids"])]
    assert (reply.prompt_token_ids, reply.completion_token_ids or []) == ([1, 2], ids)
    assert len(reply.logprobs or []) == len(ids)
    assert reply.message.get("reasoning_content", "") == "".join(p["reasoning_content"] or "" for p in parts)
    assert (reply.usage.prompt_tokens, reply.model, reply.finish_reason) == (2, "m", "stop")


@pytest.mark.parametrize("event", ["text", [1], {"choices": "x"}, {"choices": [1]}, {"choices": [{"delta": 3}]}])
def test_an_event_of_another_shape_is_a_bad_response(event: Any) -> None:
    with pytest.raises(ModelError, match="BadResponse"):
        ChatParts().add(event)


def test_only_the_first_answer_of_a_server_is_used() -> None:
    parts = ChatParts()
    for index, text in ((0, "first"), (1, "second")):
        logprobs = {"content": [{"logprob": -1.0}]}
        choice = {"index": index, "delta": {"content": text}, "token_ids": [index], "logprobs": logprobs}
        assert parts.add({"choices": [choice]}) == ("" if index else text)
    parts.add(
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}, {"index": 0, "finish_reason": "stop"}]}
    )
    reply = parse_completion(parts.payload())
    assert (reply.text, reply.completion_token_ids, reply.logprobs, reply.finish_reason) == (
        "first",
        [0],
        [-1.0],
        "stop",
    )


def test_role_of_an_answer_is_always_assistant() -> None:
    choice = {"message": {"role": "user", "content": "x"}, "finish_reason": "stop"}
    assert parse_completion({"choices": [choice]}).message == {"role": "assistant", "content": "x"}


def test_stream_without_its_end_is_not_an_answer() -> None:
    parts = ChatParts()
    parts.add({"choices": [{"delta": {"content": "half"}}]})
    with pytest.raises(ModelError, match="finish_reason"):
        parts.payload()


@pytest.mark.parametrize(
    "reason", ["sensitive", "COMPLETE", "model_context_window_exceeded", "content_filter: RECITATION"]
)
def test_other_ends_are_the_policys_choice_and_never_asked_for_again(reason: str) -> None:
    choice = {"message": {"content": "x"}, "finish_reason": reason}
    assert parse_completion({"choices": [choice]}).finish_reason == reason


def test_finish_reason_may_be_an_object() -> None:
    choice = {"message": {"content": "x"}, "finish_reason": {"type": "stop"}}
    assert parse_completion({"choices": [choice]}).finish_reason == "stop"


@pytest.mark.parametrize(
    "end",
    [
        *({"finish_reason": reason} for reason in ("abort", "insufficient_system_resource", "network_error")),
        {"finish_reason": None, "error": {"message": "the provider failed"}},
        {"finish_reason": "stop", "error": {"code": 502}},
    ],
)
def test_answer_that_the_server_broke_off_is_none(end: dict[str, Any]) -> None:
    with pytest.raises(AnswerAborted):
        parse_completion({"choices": [{"message": {"content": "half of"}, **end}]})
    parts = ChatParts()
    parts.add({"choices": [{"delta": {"content": "half of"}}]})
    parts.add({"choices": [{"delta": {}, **end}]})
    with pytest.raises(AnswerAborted):
        parse_completion(parts.payload())
