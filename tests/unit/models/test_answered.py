import asyncio
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.answers import LEAST_LOGPROB, MAY_PASS, REPEAT_PAUSES, answered, repeated, storable
from agent_runtime.models.base import ModelError, ModelReply, ModelRequest, ToolCall
from agent_runtime.models.probe import probe_request
from agent_runtime.models.providers.anthropic_endpoint import parse_answer
from agent_runtime.models.providers.openai_endpoint import usage_of

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)


@given(TEXT, TEXT, st.lists(st.floats(max_value=0, allow_nan=False), max_size=4))
def test_every_reply_can_be_stored(text: str, arguments: str, logprobs: list[float]) -> None:
    call = {"id": "1", "function": {"name": "bash", "arguments": arguments}}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    stored = storable(ModelReply(message, "stop", logprobs=logprobs))
    json.dumps(stored.message, ensure_ascii=False).encode()
    assert stored.logprobs == [LEAST_LOGPROB if value == -math.inf else value for value in logprobs]
    whole = text.encode(errors="ignore").decode()
    if whole == text and arguments.encode(errors="ignore").decode() == arguments:
        assert stored.message == message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("completion_token_ids", [1, None], "completion_token_ids.1: Input should be a valid integer, got None"),
        ("prompt_token_ids", ["x"], "prompt_token_ids.0"),
        ("finish_reason", 5, "finish_reason: Input should be a valid string, got 5"),
        ("message", {"role": "assistant", 5: 6}, "message.5"),
    ],
)
async def test_answer_that_cannot_be_stored_is_a_failure_of_the_model(field: str, value: Any, words: str) -> None:
    reply = ModelReply({"role": "assistant", "content": "x"}, "stop", prompt_token_ids=[1], completion_token_ids=[2])

    async def complete() -> ModelReply:
        return replace(reply, **{field: value})

    with pytest.raises(ModelError, match=re.escape(words)):
        await answered(complete())


def test_arguments_of_a_tool_call_are_a_dict_or_text() -> None:
    given_as_dict: object = {"command": "ls"}
    assert ToolCall("1", "bash", given_as_dict).arguments == '{"command": "ls"}'  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ToolCall bash: arguments are list, expected a dict or its JSON text"):
        ToolCall("1", "bash", [])  # type: ignore[arg-type]


def test_id_and_name_of_a_tool_call_are_text() -> None:
    with pytest.raises(TypeError, match="ToolCall: id is int, expected text"):
        ToolCall(1, "bash", "{}")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ToolCall: name is NoneType, expected text"):
        ToolCall("1", None, "{}")  # type: ignore[arg-type]


def test_tool_calls_of_an_answer_are_parsed_with_arguments_of_any_type() -> None:
    calls = [
        {"id": "1", "function": {"name": "bash", "arguments": arguments}} for arguments in (["ls"], 1, {"a": 1}, None)
    ]
    reply = ModelReply({"role": "assistant", "tool_calls": calls}, "tool_calls")
    assert [call.arguments for call in reply.tool_calls] == ['["ls"]', "1", '{"a": 1}', ""]


class Failing:
    """A model that fails a few times before it answers."""

    def __init__(self, failures: int, reason: str, *, said: str = "", after_tokens: bool = False) -> None:
        self.failures, self.reason, self.said, self.after_tokens = failures, reason, said, after_tokens
        self.calls = 0

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Fail, or answer."""
        self.calls += 1
        if self.said and request.on_text is not None:
            request.on_text(self.said)
        if self.calls > self.failures:
            return ModelReply({"role": "assistant", "content": "yes"}, "stop")
        error = ModelError(self.reason, "half an answer")
        error.after_tokens = self.after_tokens
        raise error


def a_request() -> ModelRequest:
    return replace(probe_request(seed=0, session="s", task="t", member=0), on_text=lambda text: None)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime.models.answers.REPEAT_PAUSES", (0.0,) * len(REPEAT_PAUSES))


@pytest.mark.parametrize("reason", sorted(MAY_PASS))
async def test_a_failure_that_any_request_may_meet_is_no_evidence_against_it(reason: str) -> None:
    model, request, told = Failing(len(REPEAT_PAUSES), reason), a_request(), list[str | None]()
    request.health.on_failing = told.append
    assert (await repeated(model.complete, request)).text == "yes"
    assert told == [*[f"{reason}: half an answer"] * len(REPEAT_PAUSES), None]


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (Failing(99, "BadResponse"), 1 + len(REPEAT_PAUSES)),
        (Failing(99, "Timeout"), 1),
        (Failing(99, "OtherPolicy"), 1),
        (Failing(99, "BadResponse", said="The "), 1),
        (Failing(99, "BadResponse", after_tokens=True), 1),
    ],
    ids=["fails on", "used its time", "a policy update", "a client has text", "tokens arrived"],
)
async def test_a_failed_call_ends(model: Failing, calls: int) -> None:
    with pytest.raises(ModelError, match=model.reason):
        await repeated(model.complete, a_request())
    assert model.calls == calls


async def test_an_answer_that_arrived_is_not_asked_for_again() -> None:
    """The policy wrote it: otherwise it could have each of its turns sampled again, or mask its rollout."""
    calls = []

    async def complete(request: ModelRequest) -> ModelReply:
        calls.append(request)
        return ModelReply({"role": "assistant", "content": "yes"}, "stop", logprobs=[math.nan])

    with pytest.raises(ModelError, match="cannot be recorded") as failure:
        await repeated(complete, a_request())
    assert (len(calls), failure.value.after_tokens) == (1, True)


async def test_time_on_hold_is_not_lost_too() -> None:
    request = a_request()

    async def complete(request: ModelRequest) -> ModelReply:
        await asyncio.sleep(0.05)
        request.health.held_seconds += 0.05
        return await model.complete(request)

    model = Failing(1, "BadResponse")
    await repeated(complete, request)
    assert 0 <= request.health.lost_seconds < 0.05


def test_counts_that_no_database_can_add_up_are_bounded() -> None:
    usage = usage_of({"prompt_tokens": 10**30, "completion_tokens": -2, "prompt_tokens_details": {"cached_tokens": 3}})
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2**53, 0, 3)


@pytest.mark.parametrize("count", [2.5, "many", [1], float("nan"), float("inf")])
def test_counts_that_are_no_whole_numbers_are_refused(count: object) -> None:
    for_openai, for_anthropic = {"prompt_tokens": count}, {"content": [], "usage": {"input_tokens": count}}
    with pytest.raises(ModelError, match="BadResponse"):
        usage_of(for_openai)
    with pytest.raises(ModelError, match="BadResponse"):
        parse_answer(for_anthropic, "the model")


def test_counts_of_anthropics_api_are_bounded_too() -> None:
    usage = {"input_tokens": -5, "cache_read_input_tokens": 3, "output_tokens": 10**30}
    found = parse_answer({"content": [], "usage": usage}, "the model").usage
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (3, 3, 2**53)
