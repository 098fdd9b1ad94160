"""Each field of each API is honoured, ignored or refused, and the documentation says which."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ErrorKind, Translation, decoded
from agent_runtime.proxy.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from agent_runtime.proxy.protocols.fields import ENGINE_SAMPLING
from tests.support.chat_answers import reply

USER: dict[str, Any] = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hi"}
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}

CHAT_API = openai_chat.OpenAIChat()
COMPLETIONS_API = openai_completions.OpenAICompletions()
RESPONSES_API = openai_responses.OpenAIResponses()
ANTHROPIC_API = anthropic_messages.AnthropicMessages()

MODULES = [openai_chat, openai_completions, openai_responses, anthropic_messages]
PACKAGES = [
    (CHAT_API, CHAT, chat_create_params.CompletionCreateParamsBase),
    (COMPLETIONS_API, COMPLETION, completion_create_params.CompletionCreateParamsBase),
    (RESPONSES_API, RESPONSE, response_create_params.ResponseCreateParamsBase),
    (ANTHROPIC_API, MESSAGE, message_create_params.MessageCreateParamsBase),
]


def refused(protocol: Translation, body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        protocol.parse(body, lambda id: None)
    return raised.value


@pytest.mark.parametrize(("protocol", "body", "params"), PACKAGES, ids=lambda value: getattr(value, "name", ""))
def test_no_field_of_the_package_is_called_unknown(protocol: Translation, body: dict[str, Any], params: Any) -> None:
    for name in params.__annotations__:
        try:
            protocol.parse({name: {"of": "no type"}} | body, lambda id: None)
        except BadRequest as error:
            assert "Unrecognized" not in error.message  # noqa: PT017 - which of the two it is, is the point
    assert refused(protocol, body | {"temprature": 1}).message == "Unrecognized request argument supplied: temprature"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_documentation_lists_every_field_under_its_treatment(module: Any) -> None:
    page = Path("docs/proxy-protocols.md").read_text()
    titles = {
        openai_chat: "Chat completions",
        openai_completions: "Completions",
        openai_responses: "Responses",
        anthropic_messages: "Anthropic Messages",
    }
    section = page.split(f"## {titles[module]}\n")[1].split("\n## ")[0]
    listed = {
        row[0].strip(): set(re.findall(r"`(\w+)`", row[1]))
        for row in re.findall(r"^\| (honoured|passed on|ignored|refused) \| (.*?) \|", section, re.MULTILINE)
    }
    ignored = openai_chat.IGNORED if module is openai_completions else module.IGNORED
    assert listed["honoured"] == set(module.HONOURED)
    assert listed.get("passed on", set()) == set(module.PASSED) - ENGINE_SAMPLING
    assert listed["ignored"] == set(ignored)
    assert listed["refused"] == set(module.REFUSED)
    assert set(re.findall(r"`(\w+)`", page.split("## Fields of the engine\n")[1].split("\n## ")[0])) >= ENGINE_SAMPLING


def test_sampling_reaches_the_engine_from_every_protocol() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    chat = CHAT_API.parse(
        CHAT | fields | {"max_completion_tokens": 7, "stop": "x", "seed": 3, "presence_penalty": 1}, lambda id: None
    )
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.max_tokens) == (0.5, 0.9, 7)
    assert (chat.sampling.stop, chat.seed) == (["x"], 3)
    assert chat.sampling.extra == {"top_k": 5, "presence_penalty": 1}
    response = RESPONSES_API.parse(
        RESPONSE
        | fields
        | {
            "max_output_tokens": 7,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
            "tool_choice": {"type": "function", "name": "run"},
        },
        lambda id: None,
    )
    assert response.sampling.max_tokens == 7
    assert response.sampling.extra == {
        "top_k": 5,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "tool_choice": {"type": "function", "function": {"name": "run"}},
    }
    message = ANTHROPIC_API.parse(
        MESSAGE
        | fields
        | {
            "stop_sequences": ["x"],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        },
        lambda id: None,
    )
    assert (message.sampling.max_tokens, message.sampling.stop) == (9, ["x"])
    assert message.sampling.extra == {
        "top_k": 5,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {}}},
    }


def test_tools_have_the_chat_form_whatever_the_protocol() -> None:
    schema = {"type": "object", "properties": {}}
    function = {"name": "run", "description": "Run.", "parameters": schema}
    expected = [{"type": "function", "function": function}]
    assert CHAT_API.parse(CHAT | {"tools": expected}, lambda id: None).tools == expected
    assert (
        RESPONSES_API.parse(RESPONSE | {"tools": [{"type": "function", **function}]}, lambda id: None).tools == expected
    )
    tool = {"name": "run", "description": "Run.", "input_schema": schema}
    assert ANTHROPIC_API.parse(MESSAGE | {"tools": [tool]}, lambda id: None).tools == expected


@pytest.mark.parametrize(
    ("protocol", "body", "param"),
    [
        (CHAT_API, {"model": "m"}, "messages"),
        (CHAT_API, {"messages": [USER]}, "model"),
        (CHAT_API, CHAT | {"messages": []}, "messages"),
        (CHAT_API, CHAT | {"messages": ["hi"]}, "messages[0]"),
        (CHAT_API, CHAT | {"messages": [{"role": "robot"}]}, "messages[0].role"),
        (CHAT_API, CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (CHAT_API, CHAT | {"n": 2}, "n"),
        (CHAT_API, CHAT | {"temperature": "hot"}, "temperature"),
        (CHAT_API, CHAT | {"top_p": 0}, "top_p"),
        (CHAT_API, CHAT | {"max_tokens": -1}, "max_tokens"),
        (CHAT_API, CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT_API, CHAT | {"max_tokens": True}, "max_tokens"),
        (CHAT_API, CHAT | {"stop": [""]}, "stop"),
        (CHAT_API, CHAT | {"stop": {"a": 1}}, "stop"),
        (CHAT_API, CHAT | {"stream": "yes"}, "stream"),
        (CHAT_API, CHAT | {"top_logprobs": 3}, "top_logprobs"),
        (CHAT_API, CHAT | {"functions": [{"name": "f"}]}, "functions"),
        (CHAT_API, CHAT | {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT_API, CHAT | {"tools": [{"type": "custom"}]}, "tools[0].type"),
        (CHAT_API, CHAT | {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (CHAT_API, CHAT | {"tool_choice": "sometimes"}, "tool_choice"),
        (COMPLETIONS_API, COMPLETION | {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS_API, COMPLETION | {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS_API, COMPLETION | {"prompt": None}, "prompt"),
        (COMPLETIONS_API, COMPLETION | {"best_of": 2}, "best_of"),
        (COMPLETIONS_API, COMPLETION | {"echo": True}, "echo"),
        (COMPLETIONS_API, COMPLETION | {"logprobs": 5}, "logprobs"),
        (RESPONSES_API, {"model": "m"}, "input"),
        (RESPONSES_API, RESPONSE | {"input": []}, "input"),
        (RESPONSES_API, RESPONSE | {"background": True}, "background"),
        (RESPONSES_API, RESPONSE | {"conversation": "c"}, "conversation"),
        (RESPONSES_API, RESPONSE | {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES_API, RESPONSE | {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (RESPONSES_API, RESPONSE | {"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
        (RESPONSES_API, RESPONSE | {"previous_response_id": "resp_x"}, "previous_response_id"),
        (ANTHROPIC_API, {"model": "m", "messages": [USER]}, "max_tokens"),
        (ANTHROPIC_API, MESSAGE | {"messages": [USER, {"role": "assistant", "content": "I am"}]}, "messages"),
        (ANTHROPIC_API, MESSAGE | {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (ANTHROPIC_API, MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (ANTHROPIC_API, MESSAGE | {"tools": [{"name": "run"}]}, "tools[0].input_schema"),
        (ANTHROPIC_API, MESSAGE | {"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        (ANTHROPIC_API, MESSAGE | {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_cannot_be_served_names_the_field(
    protocol: Translation, body: dict[str, Any], param: str
) -> None:
    error = refused(protocol, body)
    assert error.param == param
    assert param.partition("[")[0].partition(".")[0] in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_body_other_than_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decoded(body)


def test_a_previous_response_that_the_session_does_not_have_has_openais_own_code() -> None:
    error = refused(RESPONSES_API, RESPONSE | {"previous_response_id": "resp_x"})
    assert error.kind is ErrorKind.PREVIOUS_NOT_FOUND
    assert RESPONSES_API.error(error.kind, error.message, error.param)["error"]["code"] == "previous_response_not_found"


def test_an_answer_cut_off_at_its_limit_says_so_in_every_protocol() -> None:
    answer = ChatAnswer(reply({"role": "assistant", "content": "and th"}, finish_reason="length"), "a", 1)
    chat = CHAT_API.answer(CHAT_API.parse(CHAT, lambda id: None), answer)
    assert chat["choices"][0]["finish_reason"] == "length"
    response = RESPONSES_API.answer(RESPONSES_API.parse(RESPONSE, lambda id: None), answer)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    message = ANTHROPIC_API.answer(ANTHROPIC_API.parse(MESSAGE, lambda id: None), answer)
    assert message["stop_reason"] == "max_tokens"


def test_stop_sequence_of_an_answer_is_reported_after_a_tool_call() -> None:
    request = ANTHROPIC_API.parse(MESSAGE | {"stop_sequences": ["END"]}, lambda id: None)
    ended = replace(reply({"role": "assistant", "content": "so"}), stop_sequence="END")
    message = ANTHROPIC_API.answer(request, ChatAnswer(ended, "a", 1))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = replace(ended, message={"role": "assistant", "content": None, "tool_calls": [call]})
    message = ANTHROPIC_API.answer(request, ChatAnswer(called, "a", 1))
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("kind", ErrorKind)
def test_the_documentation_lists_every_error_as_the_packages_see_it(kind: ErrorKind) -> None:
    openai_body, anthropic_body = CHAT_API.error(kind, "")["error"], ANTHROPIC_API.error(kind, "")["error"]
    words = f"`{openai_body['type']}`" + (f", `{openai_body['code']}`" if openai_body["code"] else "")
    rows = [line.split(" | ") for line in Path("docs/proxy-protocols.md").read_text().splitlines()]
    assert [f"| {kind.status}", words, f"`{anthropic_body['type']}` |"] in [[row[0], *row[2:]] for row in rows]


@pytest.mark.parametrize("header", ["x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=2;"])
def test_claude_codes_changing_text_does_not_start_a_new_conversation(header: str) -> None:
    expected = [{"role": "system", "content": "Be good.\nBe brief."}, USER]
    blocks = [{"type": "text", "text": text} for text in (header, "Be good.", "Be brief.")]
    assert ANTHROPIC_API.parse(MESSAGE | {"system": blocks}, lambda id: None).messages == expected
    text = f"{header}\nBe good.\nBe brief."
    assert ANTHROPIC_API.parse(MESSAGE | {"system": text}, lambda id: None).messages == expected
