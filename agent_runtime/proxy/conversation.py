"""The conversations of one session as a tree, with the model's original answers. Clients send the whole conversation in
each request, with copies of the answers. Copies lose information: Anthropic's API decodes tool arguments and clients
serialise them again, chat completions has no reasoning, some clients strip white space. The inference server's tokens
are those of the original answer. So if a request has a copy of an answer at its place in the conversation, the original
replaces the copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.models.answers import MALFORMED, answer_message, decoded_object, reasoning_of
from agent_runtime.models.base import ModelReply, ToolCall
from rollout_api.records import Message, Usage

_NO_USAGE = Usage()  # shared, because creating one takes longer than the rest of a reply


@dataclass(frozen=True, slots=True)
class MatchedMessages:
    """A request's messages matched with earlier turns."""

    messages: list[Message]
    """The request's messages, with each copy of an answer replaced by the original."""
    turn: int | None
    """The latest turn whose request and answer these messages extend, or None."""
    length: int
    """Number of messages of that turn, its answer included."""


@dataclass(slots=True, eq=False)
class _Node:
    message: Message
    parent: "_Node | None"
    turn: int | None = None
    """Set if the message is an answer of the model."""
    plain: Message | None = None
    """That answer without reasoning, which is what most clients send back."""
    children: "list[_Node]" = field(default_factory=list)


class Conversations:
    """The conversations of a session."""

    def __init__(self) -> None:
        self._root = _Node({}, None)

    def add(self, messages: Sequence[Message], answer: Message, turn: int) -> None:
        """Add a turn whose answer the client has. `messages` are those of `MatchedMessages.messages`; `answer` is the
        original in a format that servers accept (`history.answer_message`).
        """
        node = self._root
        for message in messages:
            # Two turns may have equal answers. The later one is used, because the client received it last.
            same = (child for child in reversed(node.children) if child.message == message)
            if (child := next(same, None)) is None:
                child = _Node(message, node)
                node.children.append(child)
            node = child
        kept = answer_message(_reply(answer))
        node.children.append(_Node(kept, node, turn, plain_answer(kept)))

    def find(self, messages: Sequence[Message]) -> MatchedMessages:
        """Match the messages of a request, as `Translation.parse` returns them, with earlier answers."""
        reached, count, level = self._root, 0, [self._root]
        for message in messages:
            level = [child for node in level for child in node.children if _repeats_answer(message, child)]
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
        return MatchedMessages([*(node.message for node in path), *messages[count:]], turn, length)


def _repeats_answer(message: Message, node: _Node) -> bool:
    if message == node.message or message == node.plain:
        return True
    return node.turn is not None and is_copy(message, node.message)


def is_copy(message: Message, answer: Message) -> bool:
    """Whether a message is a client's copy of an answer."""
    if message.get("role") != "assistant":
        return False
    copy, given = _reply(message), _reply(answer)
    return (
        copy.text.strip() == given.text.strip()
        and reasoning_of(message).strip() in ("", reasoning_of(answer).strip())
        and len(copy.tool_calls) == len(given.tool_calls)
        and all(map(_is_same_call, copy.tool_calls, given.tool_calls))
    )


def assistant(text: str, calls: list[dict[str, Any]]) -> Message:
    """Return an assistant message in the format that all translations use."""
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


def _is_same_call(copy: ToolCall, given: ToolCall) -> bool:
    if (copy.id, copy.name) != (given.id, given.name):
        return False
    return copy.arguments == given.arguments or decoded_arguments(copy.arguments) == decoded_arguments(given.arguments)


def decoded_arguments(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, for APIs without text arguments; anything else is wrapped in an object."""
    decoded = decoded_object(arguments or "{}")
    return {MALFORMED: arguments} if decoded is None else decoded


def _reply(message: Message) -> ModelReply:
    return ModelReply(message, "", usage=_NO_USAGE)
