"""The conversations of one session as a tree, and the answers in them as the model gave them. Pure.

A client sends the whole conversation each time, with its own copy of every answer. Copies lose things on the way:
Anthropic's API decodes tool arguments and clients write them anew, chat completions has no reasoning, some clients strip
white space. But the tokens that the engine saw are those of the answer itself. So where a request has a copy of an answer
at the very place where that answer was given, the answer is meant, and takes the copy's place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.models.answers import MALFORMED, answer_message, decoded_object
from agent_runtime.models.base import ModelReply, ToolCall
from rollout_api.records import Message, Usage

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Where servers put reasoning: the older name, and vLLM's newer one."""


_NO_USAGE = Usage()  # making one costs more than all the rest of a reply


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a request's messages."""

    messages: list[Message]
    """The request's, each copy of an answer replaced by the answer."""
    turn: int | None
    """The latest turn whose request and answer these messages extend; None when they extend none."""
    length: int
    """How many messages stand for that turn, its answer included."""


@dataclass(slots=True, eq=False)
class _Node:
    message: Message
    parent: "_Node | None"
    turn: int | None = None
    """Set where the message is an answer of the model."""
    plain: Message | None = None
    """That answer without reasoning, which is what most clients send back."""
    children: "list[_Node]" = field(default_factory=list)


class Conversations:
    """What was said in a session."""

    def __init__(self) -> None:
        self._root = _Node({}, None)

    def add(self, messages: Sequence[Message], answer: Message, turn: int) -> None:
        """A turn whose answer the client has. `messages` are those of `Known.messages`; the answer is the server's own,
        and is kept as it can go back to a server (`history.answer_message`)."""
        node = self._root
        for message in messages:
            # An equal answer of another turn is another answer: the later one, for the client has heard it last.
            same = (child for child in reversed(node.children) if child.message == message)
            if (child := next(same, None)) is None:
                child = _Node(message, node)
                node.children.append(child)
            node = child
        kept = answer_message(_reply(answer))
        node.children.append(_Node(kept, node, turn, plain_answer(kept)))

    def find(self, messages: Sequence[Message]) -> Known:
        """Recognise the answers in the messages of a request, as `Translation.parse` gives them."""
        reached, count, level = self._root, 0, [self._root]
        for message in messages:
            level = [child for node in level for child in node.children if _is_said_again(message, child)]
            if not level:
                break
            reached, count = level[-1], count + 1
        path: list[_Node] = []
        node = reached
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        turn, length = None, 0
        for position, node in enumerate(path):
            if node.turn is not None:
                turn, length = node.turn, position + 1
        return Known([*(node.message for node in path), *messages[count:]], turn, length)


def _is_said_again(message: Message, node: _Node) -> bool:
    if message == node.message or message == node.plain:
        return True
    return node.turn is not None and is_copy(message, node.message)


def is_copy(message: Message, answer: Message) -> bool:
    """Whether a message is what clients make of an answer that they send back."""
    if message.get("role") != "assistant":
        return False
    copy, given = _reply(message), _reply(answer)
    return (
        copy.text.strip() == given.text.strip()
        and reasoning(message) in (None, reasoning(answer))
        and len(copy.tool_calls) == len(given.tool_calls)
        and all(map(_is_same_call, copy.tool_calls, given.tool_calls))
    )


def assistant(text: str, calls: list[dict[str, Any]]) -> Message:
    """An assistant message in the one form that all translations give it."""
    if calls:
        return {"role": "assistant", "content": text or None, "tool_calls": calls}
    return {"role": "assistant", "content": text}


def plain_answer(message: Message) -> Message:
    reply = _reply(message)
    return assistant(
        reply.text,
        [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ],
    )


def reasoning(message: Message) -> str | None:
    """The reasoning that came with an answer; None when there is none."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), None)


def _is_same_call(copy: ToolCall, given: ToolCall) -> bool:
    if (copy.id, copy.name) != (given.id, given.name):
        return False
    return copy.arguments == given.arguments or decoded_arguments(copy.arguments) == decoded_arguments(given.arguments)


def decoded_arguments(arguments: str) -> dict[str, Any]:
    """Arguments as an object, for APIs that carry no text: what is no JSON object stands inside of one."""
    decoded = decoded_object(arguments or "{}")
    return {MALFORMED: arguments} if decoded is None else decoded


def _reply(message: Message) -> ModelReply:
    return ModelReply(message, "", usage=_NO_USAGE)
