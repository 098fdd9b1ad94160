"""An answer of the proxy that a client sends back is the message that the model wrote."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.models.answers import answer_message
from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import ChatAnswer, Translation
from agent_runtime.proxy.conversation import Conversations
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from rollout_api.records import Message
from tests.support.chat_answers import conversations, reply
from tests.support.full import examples

JsonObject = dict[str, Any]
Turns = list[tuple[list[Message], Message]]


class ChatClient:
    """Keeps the conversation as agents do: appends its messages and the answers."""

    protocol: Translation = OpenAIChat()

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def request(self, said: list[Message]) -> JsonObject:
        self.messages += said
        return {"model": "m", "messages": self.messages}

    def hear(self, body: JsonObject) -> None:
        self.messages.append(body["choices"][0]["message"])


class ForgetfulChatClient(ChatClient):
    """Drops reasoning, decodes arguments and writes them again, strips text: like frameworks with their own types."""

    def hear(self, body: JsonObject) -> None:
        message = body["choices"][0]["message"]
        kept: Message = {"role": "assistant", "content": (message["content"] or "").strip()}
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = copy.deepcopy(calls)
            for call in kept["tool_calls"]:
                try:
                    decoded = json.loads(call["function"]["arguments"])
                except ValueError:
                    continue
                if isinstance(decoded, dict):
                    call["function"]["arguments"] = json.dumps(decoded, indent=1)
        self.messages.append(kept)


def as_items(said: list[Message]) -> list[JsonObject]:
    return [
        {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        if message["role"] == "tool"
        else message
        for message in said
    ]


class ResponsesClient:
    """Sends the whole input each time."""

    protocol: Translation = OpenAIResponses()

    def __init__(self) -> None:
        self.input: list[JsonObject] = []

    def request(self, said: list[Message]) -> JsonObject:
        self.input += as_items(said)
        return {"model": "m", "input": self.input}

    def hear(self, body: JsonObject) -> None:
        self.input += body["output"]


class ResponsesClientWithoutIds(ResponsesClient):
    """Sends items back without ids, as Codex does if nothing is stored."""

    def hear(self, body: JsonObject) -> None:
        self.input += [{name: value for name, value in item.items() if name != "id"} for item in body["output"]]


class ResponsesClientWithoutReasoning(ResponsesClient):
    """Drops reasoning items that are not encrypted."""

    def hear(self, body: JsonObject) -> None:
        self.input += [item for item in body["output"] if item["type"] != "reasoning"]


class ReferringResponsesClient(ResponsesClient):
    """Sends references to items."""

    def hear(self, body: JsonObject) -> None:
        self.input += [{"type": "item_reference", "id": item["id"]} for item in body["output"]]


class InterleavingResponsesClient(ResponsesClient):
    """Puts the result of each call right after it."""

    def request(self, said: list[Message]) -> JsonObject:
        for item in as_items(said):
            place = len(self.input)
            if item.get("type") == "function_call_output":
                place = 1 + next(i for i, other in enumerate(self.input) if other.get("call_id") == item["call_id"])
            self.input.insert(place, item)
        return {"model": "m", "input": self.input}


class ChainedResponsesClient:
    """Sends new items, and the id of the previous response."""

    protocol: Translation = OpenAIResponses()

    def __init__(self) -> None:
        self.previous: str | None = None

    def request(self, said: list[Message]) -> JsonObject:
        instructions = "Be good." if said[0]["role"] == "system" or self.previous else None
        said = said[1:] if said[0]["role"] == "system" else said
        self.instructed = instructions is not None
        return {
            "model": "m",
            "input": as_items(said),
            "previous_response_id": self.previous,
            "instructions": instructions,
        }

    def hear(self, body: JsonObject) -> None:
        self.previous = body["id"]


class AnthropicClient:
    """Sends content blocks with cache markers."""

    protocol: Translation = AnthropicMessages()
    thinking: JsonObject = {"type": "enabled", "budget_tokens": 1024}

    def __init__(self) -> None:
        self.system = ""
        self.messages: list[JsonObject] = []

    def request(self, said: list[Message]) -> JsonObject:
        blocks = []
        for message in said:
            if message["role"] == "system":
                self.system = message["content"]
            elif message["role"] == "tool":
                result = {"type": "text", "text": message["content"]}
                blocks.append(
                    {
                        "type": "tool_result",
                        "tool_use_id": message["tool_call_id"],
                        "content": [result],
                        "is_error": False,
                    }
                )
            else:
                blocks.append({"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}})
        self.messages.append({"role": "user", "content": blocks})
        system = {"system": [{"type": "text", "text": self.system}]} if self.system else {}
        return {"model": "m", "max_tokens": 100, "messages": self.messages, "thinking": self.thinking, **system}

    def hear(self, body: JsonObject) -> None:
        self.messages.append({"role": "assistant", "content": body["content"]})


class AnthropicClientWithoutThinking(AnthropicClient):
    """Gets no thinking, so it sends none back."""

    thinking = {"type": "disabled"}


CLIENTS: list[Callable[[], Any]] = [
    ChatClient,
    ForgetfulChatClient,
    ResponsesClient,
    ResponsesClientWithoutIds,
    ResponsesClientWithoutReasoning,
    ReferringResponsesClient,
    InterleavingResponsesClient,
    AnthropicClient,
    AnthropicClientWithoutThinking,
]


def over_the_wire(body: JsonObject) -> JsonObject:
    sent: JsonObject = json.loads(json.dumps(body))
    return sent


def talk(client: Any, turns: Turns) -> None:
    """Run a conversation, and check at each turn that the model gets its own messages."""
    conversations = Conversations()
    stored: dict[str, list[Message]] = {}
    expected: list[Message] = []
    for turn, (said, answer) in enumerate(turns):
        request = client.protocol.parse(over_the_wire(client.request(said)), stored.get)
        known = conversations.find(request.messages)
        expected += said
        assert known.messages == expected
        assert (known.turn, known.length) == ((turn - 1, len(expected) - len(said)) if turn else (None, 0))
        conversations.add(known.messages, answer, turn)
        expected.append(answer_message(ModelReply(answer, "")))
        stored[str(turn)] = list(expected)
        client.hear(over_the_wire(client.protocol.answer(request, ChatAnswer(reply(answer), str(turn), 1))))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
@settings(max_examples=examples(20))
@given(turns=conversations())
def test_continued_conversation_keeps_every_sampled_token(client: Callable[[], Any], turns: Turns) -> None:
    talk(client(), turns)


@settings(max_examples=examples(20))
@given(turns=conversations())
def test_chained_response_continues_the_previous_one_with_new_instructions(turns: Turns) -> None:
    client = ChainedResponsesClient()
    stored: dict[str, list[Message]] = {}
    spoken: list[Message] = []
    for turn, (said, answer) in enumerate(turns):
        request = client.protocol.parse(over_the_wire(client.request(said)), stored.get)
        spoken += [message for message in said if message["role"] != "system"]
        head = [{"role": "system", "content": "Be good."}] if client.instructed else []
        assert request.messages == head + spoken
        spoken.append(answer)
        stored[str(turn)] = [*request.messages, answer]
        client.hear(client.protocol.answer(request, ChatAnswer(reply(answer), str(turn), 1)))


@settings(max_examples=examples(20))
@given(turns=conversations(), data=st.data())
def test_answer_changed_by_the_client_is_not_the_models(turns: Turns, data: st.DataObject) -> None:
    for client in (ChatClient(), AnthropicClient()):
        known = Conversations()
        said, answer = turns[0]
        request = client.protocol.parse(over_the_wire(client.request(said)), lambda id: None)
        known.add(request.messages, answer, 0)
        forged = answer | {"content": (answer["content"] or "").strip() + data.draw(st.sampled_from(["x", " no"]))}
        client.hear(over_the_wire(client.protocol.answer(request, ChatAnswer(reply(forged), "0", 1))))
        again = client.protocol.parse(over_the_wire(client.request(turns[1][0])), lambda id: None)
        found = known.find(again.messages)
        assert (found.turn, found.length) == (None, 0)
        assert found.messages == again.messages
