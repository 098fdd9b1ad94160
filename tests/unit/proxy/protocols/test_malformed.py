"""Whatever a client sends, it gets an answer or status 400, never an internal error."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.proxy.chat import BadRequest, ChatAnswer, Translation
from agent_runtime.proxy.conversation import Conversations
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.google_gemini import GoogleGemini
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.proxy.protocols.openai_completions import OpenAICompletions
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from rollout_api.records import Message
from tests.support.chat_answers import JSON_VALUES, reply
from tests.support.full import examples

FUNCTION = {"name": "run", "description": "Run.", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
ANSWER: Message = {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [CALL]}
STORED: list[Message] = [{"role": "user", "content": "hi"}, ANSWER]

BODIES: list[tuple[Translation, dict[str, Any]]] = [
    (
        GoogleGemini(),
        {
            "model": "m",
            "systemInstruction": {"parts": [{"text": "Be good."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "ok"},
                        {"functionCall": {"id": "c", "name": "run", "args": {}}},
                    ],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"id": "c", "name": "run", "response": {"output": "x"}, "parts": []}},
                        {"inlineData": {"mimeType": "image/png", "data": "eA=="}},
                        {"text": "go on"},
                    ],
                },
            ],
            "tools": [{"functionDeclarations": [{"name": "run", "parameters": {"type": "OBJECT", "properties": {}}}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["run"]}},
            "generationConfig": {
                "temperature": 1,
                "maxOutputTokens": 5,
                "stopSequences": ["x"],
                "seed": 1,
                "candidateCount": 1,
                "responseModalities": ["TEXT"],
                "responseSchema": {"type": "OBJECT"},
                "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"},
            },
            "stream": True,
        },
    ),
    (
        OpenAIChat(),
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": "n"},
                {"role": "user", "content": "hi"},
                ANSWER,
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "run"}},
            "stream_options": {"include_usage": True},
            "modalities": ["text"],
            "stop": ["x"],
            "temperature": 1,
            "max_tokens": 5,
            "seed": 1,
            "n": 1,
            "logprobs": True,
            "stream": True,
        },
    ),
    (
        OpenAICompletions(),
        {"model": "m", "prompt": [[1, 2]], "logprobs": 1, "max_tokens": 5, "stop": "x", "stream": True},
    ),
    (
        OpenAIResponses(),
        {
            "model": "m",
            "instructions": "Be good.",
            "previous_response_id": "resp_a_i",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {
                    "type": "reasoning",
                    "id": "rs_b",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "message",
                    "id": "msg_b",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "ok"}],
                },
                {"type": "function_call", "id": "fc_b_0", "call_id": "c", "name": "run", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"type": "item_reference", "id": "fc_a_0"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "run"},
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
            "metadata": {"a": "b"},
            "stream": True,
        },
    ),
    (
        AnthropicMessages(),
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "Be good."}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "ok"},
                        {"type": "tool_use", "id": "c", "name": "run", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]},
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
            "tools": [{"name": "run", "input_schema": {"type": "object"}, "type": "custom", "description": "Run."}],
            "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
]

VALUES: list[Any] = [None, True, 0, -1, 1.5, "", "x", [], ["x"], [[]], [1], {}, {"x": "y"}, [{}]]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


def damaged(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    place: Any = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return body


def serve(protocol: Translation, body: dict[str, Any]) -> None:
    request = protocol.parse(body, {"a": STORED}.get)
    known = Conversations()
    known.add(STORED[:1], ANSWER, 0)
    known.find(request.messages)
    answer = ChatAnswer(reply(ANSWER), "b", 1)
    protocol.answer(request, answer)
    encoder = protocol.encoder(request, "b", 1)
    assert encoder.start(7) + encoder.reasoning("h") + encoder.text("o") + encoder.ping() + encoder.end(answer)


@pytest.mark.parametrize(("protocol", "body"), BODIES, ids=[protocol.name for protocol, _ in BODIES])
def test_well_formed_request_is_served(protocol: Translation, body: dict[str, Any]) -> None:
    serve(protocol, body)


@pytest.mark.parametrize(("protocol", "body"), BODIES, ids=[protocol.name for protocol, _ in BODIES])
def test_each_part_of_a_wrong_type_is_served_or_refused(protocol: Translation, body: dict[str, Any]) -> None:
    for path in paths(body):
        for value in VALUES:
            try:
                serve(protocol, damaged(body, path, value))
            except BadRequest:
                continue
            except Exception as error:  # noqa: BLE001 the message says which part it was
                pytest.fail(f"{path} = {value!r} raises {error!r}")


@settings(max_examples=examples(100))
@given(data=st.data())
def test_parts_with_any_json_in_them_are_served_or_refused(data: st.DataObject) -> None:
    protocol, body = data.draw(st.sampled_from(BODIES))
    for path in data.draw(st.lists(st.sampled_from(sorted(paths(body), key=repr)), min_size=1, max_size=3)):
        try:
            body = damaged(body, path, data.draw(JSON_VALUES))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier damage has removed it
    with contextlib.suppress(BadRequest):
        serve(protocol, body)
