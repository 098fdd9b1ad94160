"""Each field of each API has one treatment, which is documented."""

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_compact_params, response_create_params

from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ErrorKind, Note, NoteKind, Translation, decoded
from agent_runtime.proxy.conversation import is_copy
from agent_runtime.proxy.protocols import (
    anthropic_messages,
    google_gemini,
    openai_chat,
    openai_completions,
    openai_responses,
)
from agent_runtime.proxy.protocols.fields import ENGINE_SAMPLING, NEVER_PASSED
from tests.support.chat_answers import reply

USER: dict[str, Any] = {"role": "user", "content": "hi"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hi"}
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}

CHAT_API = openai_chat.OpenAIChat()
COMPLETIONS_API = openai_completions.OpenAICompletions()
RESPONSES_API = openai_responses.OpenAIResponses()
ANTHROPIC_API = anthropic_messages.AnthropicMessages()


def tool_result(content: list[Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content}


MODULES = [openai_chat, openai_completions, openai_responses, anthropic_messages, google_gemini]
PACKAGES: list[tuple[Any, list[Any], str]] = [
    (
        openai_chat,
        [chat_create_params.CompletionCreateParamsBase],
        # vLLM's, and the refused way to continue an answer.
        "continue_final_message priority prompt_cache_key request_id return_token_ids stream",
    ),
    (
        openai_completions,
        [completion_create_params.CompletionCreateParamsBase],
        "metadata moderation priority prompt_cache_key prompt_cache_options prompt_cache_retention request_id "
        "return_token_ids safety_identifier service_tier store stream",
    ),
    (
        openai_responses,
        [
            response_create_params.ResponseCreateParamsBase,
            response_compact_params.ResponseCompactParams,
            input_token_count_params.InputTokenCountParams,
        ],
        "client_metadata stream",  # Codex's
    ),
    (
        anthropic_messages,
        [
            message_create_params.MessageCreateParamsBase,
            beta_create_params.MessageCreateParamsBase,
            message_count_tokens_params.MessageCountTokensParams,
        ],
        "client_metadata output_format stream temperature top_p",  # of older packages, and Codex's
    ),
]


def refused(protocol: Translation, body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        protocol.parse(body, lambda id: None)
    return raised.value


def notes_of(protocol: Translation, body: dict[str, Any]) -> list[Note]:
    return list(protocol.parse(body, lambda id: None).notes)


@pytest.mark.parametrize(("module", "params", "others"), PACKAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_the_package_has_a_treatment_and_no_other_field_has(
    module: Any, params: list[Any], others: str
) -> None:
    """A field that a new version of a package adds fails this test until its treatment is chosen."""
    fields = module.FIELDS
    groups = [fields.honoured, fields.passed, fields.ignored, set(fields.dropped), set(fields.refused)]
    known = set().union(*groups)
    assert len(known) == sum(map(len, groups)), "a field has one treatment"
    of_package = set().union(*(param.__annotations__ for param in params))
    assert known - ENGINE_SAMPLING == (of_package | set(others.split())) - ENGINE_SAMPLING


@pytest.mark.parametrize(
    ("protocol", "body", "passes"),
    [
        (CHAT_API, CHAT, True),
        (COMPLETIONS_API, COMPLETION, True),
        (RESPONSES_API, RESPONSE, False),
        (ANTHROPIC_API, MESSAGE, False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_unknown_field_is_passed_on_or_dropped_with_a_note(
    protocol: Translation, body: dict[str, Any], passes: bool
) -> None:
    request = protocol.parse(body | {"newest": 1, "cache_salt": "x"}, lambda id: None)
    assert request.sampling.extra.get("newest") == (1 if passes else None)
    assert request.unknown == ({"newest"} if passes else set())
    noted = [note.text.partition(":")[0] for note in request.notes]
    assert noted == (["cache_salt"] if passes else ["cache_salt", "newest"])
    assert "cache_salt" not in request.sampling.extra


def test_limits_and_recorded_fields_cannot_be_overridden_by_an_unknown_field() -> None:
    """`Sampling.extra` overrides the body that the proxy sends to the inference server."""
    for protocol, body in ((CHAT_API, CHAT), (COMPLETIONS_API, COMPLETION)):
        for name in sorted(NEVER_PASSED):
            with contextlib.suppress(BadRequest):
                extra = protocol.parse({name: "x"} | body, lambda id: None).sampling.extra
                assert name not in extra


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_documentation_lists_every_field_under_its_treatment(module: Any) -> None:
    page = Path("docs/proxy-protocols.md").read_text()
    titles = {
        openai_chat: "Chat completions",
        openai_completions: "Completions",
        openai_responses: "Responses",
        anthropic_messages: "Anthropic Messages",
        google_gemini: "Google Gemini",
    }
    section = page.split(f"## {titles[module]}\n")[1].split("\n## ")[0]
    listed = {
        row[0].strip(): row[1]
        for row in re.findall(
            r"^\| (honoured|passed on|ignored|dropped with a note|refused) \| (.*?) \|", section, re.MULTILINE
        )
    }
    fields = module.FIELDS
    for treatment, names in (("honoured", fields.honoured), ("ignored", fields.ignored)):
        assert set(re.findall(r"`(\w+)`", listed[treatment])) == names
    assert set(re.findall(r"`(\w+)`", listed.get("passed on", ""))) == fields.passed - ENGINE_SAMPLING
    for treatment, reasons in (("dropped with a note", fields.dropped), ("refused", fields.refused)):
        assert listed.get(treatment, "") == "; ".join(f"`{name}`: {reason}" for name, reason in sorted(reasons.items()))
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


def test_default_reasoning_effort_is_left_to_the_model() -> None:
    assert CHAT_API.parse(CHAT | {"reasoning_effort": "default"}, lambda id: None).sampling.extra == {}


def test_tools_of_every_protocol_are_converted_to_the_chat_form() -> None:
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
        (CHAT_API, CHAT | {"tools": [{"type": "custom"}]}, "tools[0].custom"),
        (CHAT_API, CHAT | {"tools": [{}]}, "tools[0].type"),
        (CHAT_API, CHAT | {"continue_final_message": True}, "continue_final_message"),
        (CHAT_API, CHAT | {"messages": [{"role": "user", "content": [IMAGE_PART]}]}, "messages[0].content[0]"),
        (ANTHROPIC_API, MESSAGE | {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        (COMPLETIONS_API, COMPLETION | {"suffix": "x"}, "suffix"),
        (RESPONSES_API, RESPONSE | {"prompt": {"id": "p"}}, "prompt"),
        (CHAT_API, CHAT | {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (CHAT_API, CHAT | {"tool_choice": "sometimes"}, "tool_choice"),
        (COMPLETIONS_API, COMPLETION | {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS_API, COMPLETION | {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS_API, COMPLETION | {"prompt": None}, "prompt"),
        (COMPLETIONS_API, COMPLETION | {"best_of": 2}, "best_of"),
        (COMPLETIONS_API, COMPLETION | {"echo": True}, "echo"),
        (RESPONSES_API, {"model": "m"}, "input"),
        (RESPONSES_API, RESPONSE | {"input": []}, "input"),
        (RESPONSES_API, RESPONSE | {"conversation": "c"}, "conversation"),
        (RESPONSES_API, RESPONSE | {"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
        (RESPONSES_API, RESPONSE | {"previous_response_id": "resp_x"}, "previous_response_id"),
        (ANTHROPIC_API, {"model": "m", "messages": [USER]}, "max_tokens"),
        (ANTHROPIC_API, MESSAGE | {"messages": [USER, {"role": "assistant", "content": "I am"}]}, "messages"),
        (ANTHROPIC_API, MESSAGE | {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (ANTHROPIC_API, MESSAGE | {"tools": [{"name": "run"}]}, "tools[0].input_schema"),
        (ANTHROPIC_API, MESSAGE | {"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_cannot_be_served_names_the_field(
    protocol: Translation, body: dict[str, Any], param: str
) -> None:
    error = refused(protocol, body)
    assert error.param == param
    assert param.partition("[")[0].partition(".")[0] in error.message


@pytest.mark.parametrize(
    ("protocol", "body", "kind", "path"),
    [
        (CHAT_API, CHAT | {"top_logprobs": 3}, NoteKind.FIELD, "top_logprobs"),
        (CHAT_API, CHAT | {"functions": [{"name": "f"}]}, NoteKind.FIELD, "functions"),
        (CHAT_API, CHAT | {"modalities": ["text", "audio"]}, NoteKind.FIELD, "modalities"),
        (CHAT_API, CHAT | {"tools": [{"type": "web_search"}]}, NoteKind.TOOL, "tools[0]"),
        (CHAT_API, CHAT | {"messages": [tool_result([IMAGE_PART])]}, NoteKind.CONTENT, "messages[0].content[0]"),
        (COMPLETIONS_API, COMPLETION | {"logprobs": 5}, NoteKind.FIELD, "logprobs"),
        (RESPONSES_API, RESPONSE | {"background": True}, NoteKind.FIELD, "background"),
        (RESPONSES_API, RESPONSE | {"tools": [{"type": "local_shell"}]}, NoteKind.TOOL, "tools[0]"),
        (RESPONSES_API, RESPONSE | {"input": [USER, {"type": "computer_call"}]}, NoteKind.CONTENT, "input[1]"),
        (ANTHROPIC_API, MESSAGE | {"tools": [{"type": "web_search_20250305"}]}, NoteKind.TOOL, "tools[0]"),
        (ANTHROPIC_API, MESSAGE | {"mcp_servers": [{"url": "x"}]}, NoteKind.FIELD, "mcp_servers"),
        (
            ANTHROPIC_API,
            MESSAGE | {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, USER]},
            NoteKind.CONTENT,
            "messages[0].content[0]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_that_cannot_be_served_is_dropped_with_a_note(
    protocol: Translation, body: dict[str, Any], kind: NoteKind, path: str
) -> None:
    [note] = notes_of(protocol, body)
    assert (note.kind, note.text.partition(": ")[0]) == (kind, path)


def test_image_in_a_tool_result_is_replaced_by_a_text() -> None:
    text = {"type": "text", "text": "two files"}
    expected = "two files\n[image left out: this model reads text only]"
    chat = CHAT_API.parse(CHAT | {"messages": [tool_result([text, IMAGE_PART])]}, lambda id: None)
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text, IMAGE]}
    message = ANTHROPIC_API.parse(MESSAGE | {"messages": [{"role": "user", "content": [result]}]}, lambda id: None)
    output = [{"type": "input_text", "text": "two files"}, {"type": "input_image", "image_url": "data:x"}]
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    response = RESPONSES_API.parse(RESPONSE | {"input": [item]}, lambda id: None)
    assert [request.messages[0]["content"] for request in (chat, message, response)] == [expected] * 3


def test_choice_of_a_dropped_tool_is_dropped_with_it() -> None:
    search = {"tools": [{"type": "web_search"}], "tool_choice": "required"}
    assert CHAT_API.parse(CHAT | search, lambda id: None).sampling.extra == {}
    named = {"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": {"type": "tool", "name": "w"}}
    assert ANTHROPIC_API.parse(MESSAGE | named, lambda id: None).sampling.extra == {}


def test_custom_tool_is_a_function_for_the_model_and_custom_for_the_client() -> None:
    tool = {
        "name": "patch",
        "description": "Apply.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "s"},
    }
    call = {"id": "c", "type": "function", "function": {"name": "patch", "arguments": '{"input": "a\\nb"}'}}
    answer = ChatAnswer(reply({"role": "assistant", "content": None, "tool_calls": [call]}), "a", 1)
    chat = CHAT_API.parse(CHAT | {"tools": [{"type": "custom", "custom": tool}]}, lambda id: None)
    assert chat.tools[0]["function"]["description"] == "Apply.\nThe input follows this lark grammar:\ns"
    [told] = CHAT_API.answer(chat, answer)["choices"][0]["message"]["tool_calls"]
    assert told == {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    again = CHAT_API.parse(CHAT | {"messages": [{"role": "assistant", "tool_calls": [told]}, USER]}, lambda id: None)
    response = RESPONSES_API.parse(RESPONSE | {"tools": [{"type": "custom", **tool}]}, lambda id: None)
    [item] = RESPONSES_API.answer(response, answer)["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a\nb")
    resent = RESPONSES_API.parse(RESPONSE | {"input": [item, USER]}, lambda id: None)
    assert is_copy(again.messages[0], answer.reply.message)
    assert is_copy(resent.messages[0], answer.reply.message)


@pytest.mark.parametrize(("text", "seen"), [("no such file", "Error: no such file"), ("Error 2", "Error 2")])
def test_failed_tool_result_is_marked_for_the_model(text: str, seen: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": text}
    body = MESSAGE | {"messages": [{"role": "user", "content": [result]}]}
    assert ANTHROPIC_API.parse(body, lambda id: None).messages[0]["content"] == seen


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}'])
def test_body_other_than_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decoded(body)


def test_a_previous_response_that_the_session_does_not_have_has_openais_own_code() -> None:
    error = refused(RESPONSES_API, RESPONSE | {"previous_response_id": "resp_x"})
    assert error.kind is ErrorKind.PREVIOUS_NOT_FOUND
    assert RESPONSES_API.error(error.kind, error.message, error.param)["error"]["code"] == "previous_response_not_found"


def test_answer_cut_off_at_its_limit_is_marked_in_every_protocol() -> None:
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
