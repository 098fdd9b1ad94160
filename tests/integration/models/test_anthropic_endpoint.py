"""The Messages API: translated in both directions, checked with Anthropic's own package."""

from typing import Any

import anthropic
import pytest
from anthropic.types import Message, message_create_params
from pydantic import TypeAdapter

from agent_runtime.models.base import ContextExceeded, ModelConfigError, ModelError
from rollout_api.model import Sampling

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [
        {"type": "thinking", "thinking": "hmm", "signature": "s"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 2},
}


@pytest.fixture
def claude(server: Any, connect: Any) -> Any:
    server.usual = ANSWER
    return connect(api="Anthropic", name="claude")


async def test_answer_with_a_tool_call_is_returned_in_openais_form(claude: Any, make_request: Any) -> None:
    Message.model_validate(ANSWER)
    reply = await claude.complete(make_request(tools=[TOOL]))
    assert (reply.text, reply.finish_reason) == ("Looking.", "tool_calls")
    [call] = reply.tool_calls
    assert (call.id, call.name, call.arguments) == ("toolu_1", "f", '{"a": 1}')
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (17, 3, 10)
    assert reply.message["reasoning_content"] == "hmm"


@pytest.mark.parametrize(
    "body",
    [
        "<html>gateway</html>",
        '{"content": [',
        {"content": [{"type": "text"}]},
        ANSWER | {"usage": {"input_tokens": "x"}},
    ],
)
async def test_unexpected_answer_is_reported_with_the_server(
    claude: Any, server: Any, make_request: Any, faults: Any, body: Any
) -> None:
    server.plan(faults["status"](200, body))
    with pytest.raises(ModelError, match="BadResponse") as raised:
        await claude.complete(make_request())
    assert server.url.removesuffix("/v1") in str(raised.value)


async def test_request_with_tool_results_has_the_declared_anthropic_form(
    claude: Any, server: Any, make_request: Any
) -> None:
    first = await claude.complete(make_request(tools=[TOOL]))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        first.message,
        {"role": "tool", "tool_call_id": "toolu_1", "content": "42"},
        {"role": "user", "content": "go on"},
    ]
    await claude.complete(make_request(messages=messages, tools=[TOOL], sampling=Sampling(stop=["x"], temperature=0.1)))
    body, headers = server.bodies[1], server.headers[1]
    TypeAdapter(message_create_params.MessageCreateParamsNonStreaming).validate_python(body)
    assert body["system"] == "Be brief."
    assert body["max_tokens"] > 0
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == ANSWER["content"], "signed thinking goes back unchanged"
    assert body["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"},
        {"type": "text", "text": "go on"},
    ]
    assert headers["x-api-key"] == "secret-key-of-the-job"
    assert headers["anthropic-version"]


async def test_anthropics_package_sends_the_same_conversation_in_the_same_form(
    claude: Any, server: Any, make_request: Any
) -> None:
    await claude.complete(make_request(tools=[TOOL], max_tokens=10))
    async with anthropic.AsyncAnthropic(base_url=server.url.removesuffix("/v1"), api_key="k") as client:
        theirs = await client.messages.create(
            model="claude",
            max_tokens=10,
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            tools=[{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
        )
    assert theirs.content[2].type == "tool_use"
    assert server.bodies[0] == server.bodies[1]


async def test_malformed_arguments_of_an_earlier_call_do_not_break_the_conversation(
    claude: Any, server: Any, make_request: Any
) -> None:
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "no JSON"},
    ]
    await claude.complete(make_request(messages=messages))
    assert server.bodies[0]["messages"][1]["content"][0]["input"] == {"malformed_arguments": '{"a": '}


async def test_too_long_prompt_counts_against_the_policy(
    claude: Any, server: Any, make_request: Any, faults: Any
) -> None:
    body = {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"},
    }
    server.plan(faults["status"](400, body))
    with pytest.raises(ContextExceeded):
        await claude.complete(make_request())


async def test_overloaded_server_fails_no_rollout(claude: Any, server: Any, make_request: Any, faults: Any) -> None:
    server.plan(
        faults["status"](529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    )
    assert (await claude.complete(make_request())).text == "Looking."


async def test_a_refusal_of_the_model_is_a_content_filter_stop(claude: Any, server: Any, make_request: Any) -> None:
    server.usual = ANSWER | {"content": [], "stop_reason": "refusal"}
    assert (await claude.complete(make_request())).finish_reason == "content_filter"


async def test_an_unknown_model_is_a_config_error(claude: Any, server: Any, faults: Any) -> None:
    server.plan(
        faults["status"](404, {"type": "error", "error": {"type": "not_found_error", "message": "model: claude"}})
    )
    with pytest.raises(ModelConfigError, match="it serves m, other"):
        await claude.check()
