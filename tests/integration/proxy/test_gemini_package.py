"""The google-genai package, whose protocol Gemini CLI uses, as a client of the proxy."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google import genai

from agent_runtime.proxy.protocols import google_gemini
from tests.support.chat_upstream import THOUGHT
from tests.support.package_servers import Servers

DECLARATION = {
    "name": "run",
    "description": "Run it.",
    "parameters": {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}},
}
TOOLS = {"tools": [{"function_declarations": [DECLARATION]}]}
OpenClient = Callable[..., Any]


@pytest.fixture
def gemini(servers: Servers) -> Iterator[OpenClient]:
    """Return a client of the package in a session of its own."""
    clients: list[Any] = []

    def opened(**session: Any) -> Any:
        url, key = servers.key(**session)
        clients.append(genai.Client(api_key=key, http_options={"base_url": url}))
        return clients[-1].models

    yield opened
    for client in clients:
        client.close()


def test_every_field_of_the_package_has_a_treatment() -> None:
    config = google_gemini.CONFIG
    known = config.honoured | config.ignored | config.dropped.keys()
    fields = genai.types.GenerationConfig.model_fields.values()
    assert known == {field.alias for field in fields}


def test_content_is_generated(gemini: OpenClient) -> None:
    reply = gemini().generate_content(model="m", contents="hi there", config={"system_instruction": "Be good."})
    assert (reply.text, reply.candidates[0].finish_reason) == ("You said: hi there", "STOP")
    counted = reply.usage_metadata
    assert (counted.prompt_token_count, counted.thoughts_token_count, counted.total_token_count) == (12, 5, 19)


def test_streamed_content_has_thoughts_first(gemini: OpenClient, servers: Servers) -> None:
    config = {"thinking_config": {"include_thoughts": True}}
    chunks = list(gemini().generate_content_stream(model="m", contents="reason 1", config=config))
    parts = [part for chunk in chunks for each in chunk.candidates or [] for part in each.content.parts or []]
    assert "".join(part.text for part in parts if part.thought) == THOUGHT
    assert "".join(part.text for part in parts if not part.thought).strip() == "Forty-two."
    assert [bool(part.thought) for part in parts] == sorted((bool(part.thought) for part in parts), reverse=True)
    assert chunks[-1].candidates[0].finish_reason == "STOP"


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_with_tools_is_one_conversation(gemini: OpenClient, servers: Servers, streamed: bool) -> None:
    models = gemini()

    def ask(contents: list[Any]) -> list[Any]:
        if not streamed:
            return [models.generate_content(model="m", contents=contents, config=TOOLS).candidates[0].content]
        chunks = models.generate_content_stream(model="m", contents=contents, config=TOOLS)
        return [chunk.candidates[0].content for chunk in chunks if chunk.candidates]

    contents: list[Any] = [{"role": "user", "parts": [{"text": "parallel"}]}]
    answer = ask(contents)
    calls = [part.function_call for content in answer for part in content.parts if part.function_call]
    assert [call.args for call in calls] == [{"command": "a"}, {"command": "b"}]
    results = [
        {"function_response": {"id": call.id, "name": "run", "response": {"output": f"file {call.args['command']}"}}}
        for call in calls
    ]
    ask([*contents, *answer, {"role": "user", "parts": results}, {"role": "user", "parts": [{"text": "next"}]}])
    messages = servers.asked["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [message["content"] for message in messages[2:]] == ["file a", "file b", "next"]
    assert servers.asked["tools"][0]["function"]["parameters"]["type"] == "object"


def test_tokens_are_counted_and_models_listed(gemini: OpenClient) -> None:
    models = gemini(exact=True)
    assert models.count_tokens(model="m", contents="hi there").total_tokens > 3
    assert [model.name for model in models.list()] == ["models/m"]
    assert models.get(model="m").name == "models/m"


def test_errors_are_exceptions_of_the_package(gemini: OpenClient) -> None:
    models = gemini()
    for model, contents, code in (("zz", "x", 404), ("m", "toolong", 400)):
        with pytest.raises(genai.errors.ClientError) as raised:
            models.generate_content(model=model, contents=contents)
        assert raised.value.code == code
    with pytest.raises(genai.errors.ClientError, match="INVALID_ARGUMENT"):
        models.generate_content(model="m", contents="hi", config={"candidate_count": 2})


def test_tool_of_google_is_dropped_and_choice_is_passed(gemini: OpenClient, servers: Servers) -> None:
    calling = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["run"]}}
    tools = [*TOOLS["tools"], {"google_search": {}}]
    config = {"tools": tools, "tool_config": calling, "top_k": 5, "seed": 3, "stop_sequences": ["X"]}
    reply = gemini().generate_content(model="m", contents="tool", config=config)
    assert "googleSearch" in reply.sdk_http_response.headers["x-rollout-notes"]
    asked = servers.asked
    assert (asked["tool_choice"]["function"]["name"], asked["top_k"], asked["stop"]) == ("run", 5, ["X"])
