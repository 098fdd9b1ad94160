"""An MCP server's answer as the model sees it, and the call of each answer on a connection that outlives calls."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage
from mcp.types import CallToolResult, JSONRPCResponse

from agent_runtime.tools.mcp.stdio import _message
from agent_runtime.tools.mcp.tool import result_of, tool_name


def answered(*content: dict[str, Any], **fields: Any) -> Any:
    return result_of(CallToolResult.model_validate({"content": list(content), **fields}))


def test_texts_are_shown_and_other_content_is_named() -> None:
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    resource = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}
    result = answered({"type": "text", "text": "one"}, image, resource)
    assert result.content == "one\n[image image/png, which cannot be shown as text]\ninside"
    assert not result.error


def test_empty_text_of_a_server_stays_empty() -> None:
    assert answered({"type": "text", "text": ""}).content == ""


def test_a_failure_and_structured_content_are_kept_as_such() -> None:
    assert answered({"type": "text", "text": "no"}, isError=True).error
    result = answered(structuredContent={"sum": 3})
    assert (result.content, result.data) == ("{'sum': 3}", {"structuredContent": {"sum": 3}})


@given(st.text(max_size=40))
def test_any_name_of_a_tool_becomes_one_that_servers_of_models_accept(name: str) -> None:
    made = tool_name("time", name)
    assert made.startswith("time__")
    assert all(character.isascii() and (character.isalnum() or character in "_-") for character in made)


@pytest.mark.parametrize(
    ("wire_id", "seen"), [("3:0/7", 7), ("3:1/7", None), ("13:0/7", None), (7, None), ("3:0/x", None)]
)
def test_answer_to_another_call_is_ignored(wire_id: Any, seen: int | None) -> None:
    received = _message(json.dumps({"jsonrpc": "2.0", "id": wire_id, "result": {}}).encode(), "3:0")
    if seen is None:
        assert received is None
    else:
        assert isinstance(received, SessionMessage)
        assert isinstance(received.message, JSONRPCResponse)
        assert received.message.id == seen


@given(st.binary())
def test_invalid_line_is_an_error_of_the_server(line: bytes) -> None:
    assert _message(line, "3:0") is None or isinstance(_message(line, "3:0"), Exception | SessionMessage)
