"""The openai and anthropic packages build the same answer from a stream as from a complete body."""

from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import ChatAnswer, ErrorKind, Translation, decoded
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.proxy.protocols.openai_completions import OpenAICompletions
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from rollout_api.records import Message
from tests.support.chat_answers import answers, reply
from tests.support.full import examples

PROTOCOLS: list[Translation] = [OpenAIChat(), OpenAICompletions(), OpenAIResponses(), AnthropicMessages()]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOL = {"name": "run", "description": "Run it.", "parameters": {"type": "object", "properties": {}}}


class Proxy(httpx2.BaseTransport):
    """Answers the packages' requests with one reply, part of whose text is streamed."""

    def __init__(
        self, model_reply: ModelReply, pieces: list[str], error: ErrorKind | None = None, thoughts: Sequence[str] = ()
    ) -> None:
        self.answer, self.pieces, self.error = ChatAnswer(model_reply, "a1", 1700000000), pieces, error
        self.thoughts = thoughts

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        protocol = next(protocol for protocol in PROTOCOLS if request.url.path == f"/v1{protocol.path}")
        parsed = protocol.parse(decoded(request.read()), lambda id: None)
        if not parsed.stream:
            return httpx2.Response(200, json=protocol.answer(parsed, self.answer))
        encoder = protocol.encoder(parsed, self.answer.id, self.answer.created)
        events = [encoder.start(0), *(encoder.reasoning(piece) for piece in self.thoughts), encoder.ping()]
        events += [encoder.text(piece) for piece in self.pieces]
        events.append(encoder.error(self.error, "it broke") if self.error else encoder.end(self.answer))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(events))


def openai_client(proxy: Proxy) -> openai.OpenAI:
    http = httpx2.Client(transport=proxy)
    return openai.OpenAI(base_url="http://proxy/v1", api_key="k", http_client=http, max_retries=0)


def anthropic_client(proxy: Proxy) -> anthropic.Anthropic:
    http = httpx2.Client(transport=proxy)
    return anthropic.Anthropic(base_url="http://proxy", api_key="k", http_client=http, max_retries=0)


@st.composite
def streamed_answers(draw: st.DrawFn) -> tuple[Message, list[str]]:
    """An answer, and pieces that contain the beginning of its text or all of it."""
    message = draw(answers())
    text = message["content"] or ""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return message, [text[a:b] for a, b in zip([0, *cuts], cuts, strict=False) if a < b]


@settings(max_examples=examples(20))
@given(streamed=streamed_answers())
def test_chat_completions(streamed: tuple[Message, list[str]]) -> None:
    client = openai_client(Proxy(reply(streamed[0]), streamed[1]))
    with client:
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        whole = client.chat.completions.create(model="m", messages=MESSAGES, tools=tools)
        with client.chat.completions.stream(
            model="m", messages=MESSAGES, tools=tools, stream_options={"include_usage": True}
        ) as stream:
            final = stream.get_final_completion()
    assert (final.id, final.created, final.model, final.usage) == (whole.id, whole.created, whole.model, whole.usage)
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    ours: Any = whole.choices[0].message
    theirs: Any = final.choices[0].message
    assert (theirs.content or None) == (ours.content or None)
    assert theirs.model_extra.get("reasoning_content") == ours.model_extra.get("reasoning_content")
    assert [(call.id, call.function.name, call.function.arguments) for call in theirs.tool_calls or []] == [
        (call.id, call.function.name, call.function.arguments) for call in ours.tool_calls or []
    ]


@settings(max_examples=examples(20))
@given(streamed=streamed_answers())
def test_completions(streamed: tuple[Message, list[str]]) -> None:
    with openai_client(Proxy(reply(streamed[0]), streamed[1])) as client:
        whole = client.completions.create(model="m", prompt="Once")
        chunks = list(client.completions.create(model="m", prompt=[1, 2], stream=True))
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [
        whole.choices[0].finish_reason
    ]
    assert {chunk.id for chunk in chunks} == {whole.id}


@settings(max_examples=examples(20))
@given(streamed=streamed_answers())
def test_responses(streamed: tuple[Message, list[str]]) -> None:
    message, pieces = streamed
    with openai_client(Proxy(reply(message), pieces)) as client:
        tools: list[Any] = [{"type": "function", "strict": False, **TOOL}]
        whole = client.responses.create(model="m", input="hi", tools=tools)
        with client.responses.stream(model="m", input="hi", tools=tools) as stream:
            events = list(stream)
            final: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert final.usage == whole.usage
    assert (final.id, final.status, final.output_text) == (whole.id, whole.status, whole.output_text)
    behind_the_text = sorted(whole.output, key=lambda item: (item.type == "function_call", item.type == "reasoning"))
    expected = behind_the_text if pieces else whole.output
    assert as_sent([item.to_dict() for item in final.output]) == [item.to_dict() for item in expected]
    # The items of the events equal those of the final response.
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text


def as_sent(value: Any) -> Any:
    """Return the value without what the packages add when they parse."""
    if isinstance(value, list):
        return [as_sent(item) for item in value]
    if isinstance(value, dict):
        return {name: as_sent(item) for name, item in value.items() if not name.startswith("parsed")}
    return value


@settings(max_examples=examples(20))
@given(streamed=streamed_answers(), thinking=st.booleans())
def test_anthropic_messages(streamed: tuple[Message, list[str]], thinking: bool) -> None:
    message, pieces = streamed
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 2000,
        "messages": MESSAGES,
        "thinking": {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"},
        "tools": [{"name": "run", "input_schema": TOOL["parameters"]}],
    }
    with anthropic_client(Proxy(reply(message), pieces)) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    behind_the_text = sorted(whole.content, key=lambda block: (block.type == "tool_use", block.type == "thinking"))
    expected = behind_the_text if pieces else whole.content
    assert as_sent([block.to_dict() for block in final.content]) == [block.to_dict() for block in expected]
    assert (final.id, final.stop_reason) == (whole.id, whole.stop_reason)
    assert final.usage.to_dict() == whole.usage.to_dict()
    assert any(block.type == "thinking" for block in whole.content) == (thinking and "reasoning_content" in message)


@settings(max_examples=examples(20))
@given(streamed=streamed_answers(), cut=st.integers(0, 20))
def test_streamed_reasoning_is_sent_once_and_before_the_text(streamed: tuple[Message, list[str]], cut: int) -> None:
    message, pieces = streamed
    thought = message.get("reasoning_content", "")
    thoughts = [piece for piece in (thought[:cut], thought[cut:] if pieces else "") if piece]
    proxy = Proxy(reply(message), pieces, thoughts=thoughts)
    with openai_client(proxy) as client:
        with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
            chat: Any = stream.get_final_completion().choices[0].message
        with client.responses.stream(model="m", input="hi") as responses:
            response = responses.get_final_response()
    with (
        anthropic_client(proxy) as claude,
        claude.messages.stream(
            model="m", max_tokens=2000, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024}
        ) as messages,
    ):
        blocks: list[Any] = messages.get_final_message().content
    assert (chat.model_extra or {}).get("reasoning_content", "") == thought
    kinds = [item.type for item in response.output]
    assert kinds.count("reasoning") == bool(thought)
    if thought:
        first: Any = response.output[0]
        assert (first.type, first.content[0].text) == ("reasoning", thought)
        assert (blocks[0].type, blocks[0].thinking) == ("thinking", thought)


BROKEN = Proxy(reply({"role": "assistant", "content": "never"}), ["nev"], ErrorKind.BAD_GATEWAY)


def chat_stream() -> Iterator[Any]:
    return iter(openai_client(BROKEN).chat.completions.create(model="m", messages=MESSAGES, stream=True))


def completions_stream() -> Iterator[Any]:
    return iter(openai_client(BROKEN).completions.create(model="m", prompt="x", stream=True))


def responses_stream() -> Iterator[Any]:
    return iter(openai_client(BROKEN).responses.create(model="m", input="x", stream=True))


@pytest.mark.parametrize("stream", [chat_stream, completions_stream, responses_stream])
def test_a_stream_that_fails_raises_in_the_openai_package_instead_of_ending_early(stream: Any) -> None:
    with pytest.raises(openai.APIError, match="it broke") as raised:
        list(stream())
    assert raised.value.code == "model_failed"


def test_a_stream_that_fails_raises_in_the_anthropic_package_instead_of_ending_early() -> None:
    with pytest.raises(anthropic.APIError, match="it broke"):
        list(anthropic_client(BROKEN).messages.create(model="m", max_tokens=9, messages=MESSAGES, stream=True))


def test_text_that_streamed_before_the_server_trimmed_it_is_not_sent_twice() -> None:
    sent = ["Let me ", "look.\n\n"]
    trimmed = reply(
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}],
        }
    )
    with openai_client(Proxy(trimmed, sent)) as client:
        with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
            assert stream.get_final_completion().choices[0].message.content == "Let me look.\n\n"
        with client.responses.stream(model="m", input="hi") as response_stream:
            assert response_stream.get_final_response().output_text == "Let me look.\n\n"
    claude = anthropic_client(Proxy(trimmed, sent))
    with claude, claude.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as message_stream:
        assert message_stream.get_final_message().content[0].to_dict()["text"] == "Let me look.\n\n"
