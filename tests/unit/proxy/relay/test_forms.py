"""Messages that cross the relay arrive unchanged."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.base import (
    ContentFiltered,
    ContextExceeded,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
    TokenPrefix,
)
from agent_runtime.proxy.relay import schemas
from rollout_api.model import Sampling
from rollout_api.records import PolicySpan, Usage

IDS = st.lists(st.integers(0, 200_000), max_size=5)
TEXT = st.text(max_size=20)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}
)
ANSWERS = st.builds(
    lambda content, calls, more: {
        "role": "assistant",
        "content": content,
        **({"tool_calls": calls} if calls else {}),
        **more,
    },
    st.none() | TEXT,
    st.lists(CALL, max_size=2),
    st.dictionaries(st.just("reasoning_content"), TEXT),
)
REPLIES = st.builds(
    ModelReply,
    message=ANSWERS,
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
    model=TEXT,
    usage=st.builds(Usage, prompt_tokens=st.integers(0, 9), completion_tokens=st.integers(0, 9)),
    prompt_token_ids=st.none() | IDS,
    completion_token_ids=st.none() | IDS,
    logprobs=st.none() | st.lists(st.floats(-20, 0), max_size=5),
    policy_spans=st.lists(st.builds(PolicySpan, tokens=st.integers(1, 9), version=st.none() | st.just("7"))),
    stop_sequence=st.none() | st.text(max_size=5),
)
REQUESTS = st.builds(
    ModelRequest,
    messages=st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}), max_size=3),
    tools=st.lists(st.fixed_dictionaries({"type": st.just("function")}), max_size=2),
    sampling=st.builds(
        Sampling,
        temperature=st.none() | st.floats(0, 2),
        top_p=st.none() | st.floats(0.1, 1),
        max_tokens=st.none() | st.integers(1, 9),
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
        extra=st.dictionaries(st.sampled_from(["top_k", "repetition_penalty"]), st.integers(1, 3)),
    ),
    seed=st.integers(0, 2**31 - 1),
    session=TEXT,
    task=TEXT,
    member=st.integers(0, 7),
    turn=st.integers(0, 200),
    prefix=st.none() | st.builds(TokenPrefix, st.integers(0, 9), IDS),
)


@given(REQUESTS, TEXT | IDS)
def test_worker_continues_the_bare_prompt(request: ModelRequest, prompt: str | list[int]) -> None:
    message = schemas.request_message("r", request, "m", prompt)
    assert schemas.prompt_of(message) == prompt
    assert schemas.request_of(message).messages == []


@given(REQUESTS)
def test_conversation_is_never_a_bare_prompt(request: ModelRequest) -> None:
    assert schemas.prompt_of(schemas.request_message("r", request, "m")) is None
    assert schemas.prompt_of({"type": "completion_request", "request_id": "of an older proxy"}) is None


@pytest.mark.parametrize("prompt", [1, {}, ["a"], [1.5], True])
def test_prompt_of_another_form_is_refused_with_what_was_expected(prompt: object) -> None:
    with pytest.raises(schemas.FormError, match="prompt: expected a text, or a list of token ids"):
        schemas.prompt_of({"prompt": prompt})


@given(REPLIES)
def test_an_answer_is_recorded_as_the_worker_got_it(reply: ModelReply) -> None:
    assert schemas.reply_of(schemas.reply_message("r", reply)) == reply


@given(REQUESTS)
def test_request_is_the_same_after_the_relay(request: ModelRequest) -> None:
    assert schemas.request_of(schemas.request_message("r", request, "m")) == request


def test_lower_of_two_limits_reaches_the_model() -> None:
    request = ModelRequest([], [], Sampling(max_tokens=100), 0, "s", "t", 0, 0, max_tokens=7)
    assert schemas.request_of(schemas.request_message("r", request, "m")).sampling.max_tokens == 7


@pytest.mark.parametrize(
    "error",
    [
        ModelError("Timeout", "no answer"),
        ModelConfigError("KeyRefused", "wrong key"),
        RequestRefused("BadRequest", "logit_bias: 99999 is no token"),
        ContextExceeded("too long"),
        ContentFiltered("no"),
        ContextExceeded(""),
    ],
    ids=repr,
)
def test_relayed_failure_keeps_its_type(error: Any) -> None:
    with pytest.raises(type(error)) as raised:
        schemas.reply_of(schemas.error_message("r", error))
    assert type(raised.value) is type(error)
    assert getattr(raised.value, "reason", None) == getattr(error, "reason", None)
    assert str(error) in str(raised.value)


def test_an_answer_of_a_worker_of_verl_is_read() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    reply = schemas.reply_of(
        {
            "type": "completion_response",
            "request_id": "r",
            "token_ids": [1, 2],
            "log_probs": [-1.0, -2.0],
            "completion_text": "<tool_call>…",
            "content_text": "",
            "tool_calls": calls,
            "finish_reason": "tool_calls",
            "weight_version": 3,
            "error": None,
        }
    )
    assert reply.message == {"role": "assistant", "content": "", "tool_calls": calls}
    assert (reply.completion_token_ids, reply.logprobs) == ([1, 2], [-1.0, -2.0])
    assert reply.policy_spans == [PolicySpan(tokens=2, version="3")]
    with pytest.raises(ModelError, match="out of memory"):
        schemas.reply_of({"type": "completion_response", "error": "out of memory", "token_ids": [], "content_text": ""})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
RESPONSE_FIELDS = ["message", "token_ids", "log_probs", "content_text", "tool_calls", "usage", "policy_spans", "model"]


@given(st.dictionaries(st.sampled_from(RESPONSE_FIELDS), JSON))
def test_invalid_answer_is_refused_with_a_message(message: dict[str, Any]) -> None:
    with contextlib.suppress(schemas.FormError):
        reply = schemas.reply_of(message)
        assert reply.message["role"] == "assistant"
        assert all(isinstance(id, int) for id in reply.completion_token_ids or [])


REQUEST_FIELDS = ["messages", "tools", "temperature", "top_p", "max_tokens", "stop", "extra", "prefix", "seed"]
WHOLE = schemas.request_message("r", ModelRequest([], [], Sampling(), 0, "s", "t", 0, 0), "m")


@given(st.dictionaries(st.sampled_from(REQUEST_FIELDS), JSON))
def test_invalid_request_is_refused_with_a_message(changed: dict[str, Any]) -> None:
    with contextlib.suppress(schemas.FormError):
        assert schemas.request_of(WHOLE | changed).session == "s"
