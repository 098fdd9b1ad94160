"""Items of OpenAI's Responses: what one answer gives, and the messages that a list of them stands for. Pure.

One answer is up to three kinds of items: reasoning, a message, function calls. Their ids are made of the answer's, so that
items that come back are put together again as they were.
"""

from collections.abc import Sequence
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, Earlier, JsonObject
from agent_runtime.proxy.conversation import assistant, reasoning
from agent_runtime.proxy.protocols.fields import objects, required
from agent_runtime.proxy.protocols.openai_chat import parse_text
from rollout_api.records import Message

ANSWER_PREFIX = "resp_"
MESSAGE_ROLES = ("user", "system", "developer", "assistant")

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is not whole, by the finish reason of chat completions."""


def reasoning_item(id: str, text: str) -> JsonObject:
    """Reasoning as open models give it: its text, and no summary."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content}


def message_item(id: str, text: str, finish_reason: str) -> JsonObject:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if finish_reason in INCOMPLETE else "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def call_items(id: str, message: Message) -> list[JsonObject]:
    return [
        {
            "id": f"fc_{id}_{position}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for position, call in enumerate(ModelReply(message, "").tool_calls)
    ]


def output_items(message: Message, id: str, finish_reason: str) -> list[JsonObject]:
    """All of an answer; `id` is the answer's. An answer without anything still has a message, which can come back."""
    thought, text, calls = reasoning(message), ModelReply(message, "").text, call_items(id, message)
    return [
        *([reasoning_item(id, thought)] if thought else []),
        *([message_item(id, text, finish_reason)] if text or not calls else []),
        *calls,
    ]


def bare_response(request: ChatRequest, id: str, created: int) -> JsonObject:
    return {
        "id": f"{ANSWER_PREFIX}{id}{request.extra['suffix']}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        **request.extra["echo"],
    }


def whole_response(request: ChatRequest, answer: ChatAnswer, output: Sequence[JsonObject]) -> JsonObject:
    reason = INCOMPLETE.get(answer.reply.finish_reason)
    counted = answer.reply.usage
    return bare_response(request, answer.id, answer.created) | {
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "usage": {
            "input_tokens": counted.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counted.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        },
    }


class _Answer:
    """Items of one answer, while they are put together."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[JsonObject] = []

    def takes(self, kind: str) -> bool:
        """Whether an item that follows belongs to this answer: the API writes them in this order."""
        return kind == "function_call" or not (self.calls or (self.texts if kind == "message" else self.thoughts))

    def message(self) -> Message:
        thought = {"reasoning_content": "".join(self.thoughts)} if self.thoughts else {}
        return assistant("".join(self.texts), self.calls) | thought


def parse_items(items: Sequence[JsonObject], where: str, earlier: Earlier) -> list[Message]:
    """The messages that items stand for. Raises BadRequest."""
    parsed: list[Message | _Answer] = []
    last: _Answer | None = None
    for i, item in enumerate(items):
        path = f"{where}[{i}]"
        item = _resolved(item, path, earlier)
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            output = parse_text(item.get("output"), f"{path}.output", "\n")
            parsed.append({"role": "tool", "content": output, "tool_call_id": required(item, "call_id", str, path)})
        elif kind == "message" and item.get("role") != "assistant":
            parsed.append(_message(item, path))
        elif kind in ("message", "reasoning", "function_call"):
            key = _answer_id(item)
            follows = bool(parsed) and parsed[-1] is last
            # Clients may put the result of a call right behind it, before the answer's next call.
            if last is None or not ((follows and last.takes(kind)) or (key is not None and key == last.key)):
                last = _Answer()
                parsed.append(last)
            last.key = key if last.key is None else last.key
            _add(last, kind, item, path)
        else:
            raise BadRequest(
                f"{path}.type: {kind!r}; expected message, reasoning, function_call, function_call_output or item_reference",
                f"{path}.type",
            )
    return [part.message() if isinstance(part, _Answer) else part for part in parsed]


def _add(answer: _Answer, kind: str, item: JsonObject, where: str) -> None:
    if kind == "message":
        answer.texts.append(parse_text(item.get("content"), f"{where}.content", ""))
    elif kind == "reasoning":
        parts = objects(item.get("content") or item.get("summary") or [], where)
        # Reasoning that is encrypted can be read by nobody here.
        answer.thoughts.extend(required(part, "text", str, where) for part in parts)
    else:
        function = {"name": required(item, "name", str, where), "arguments": required(item, "arguments", str, where)}
        answer.calls.append({"id": required(item, "call_id", str, where), "type": "function", "function": function})


def _message(item: JsonObject, where: str) -> Message:
    role = required(item, "role", str, where)
    if role not in MESSAGE_ROLES:
        raise BadRequest(f"{where}.role: {role!r}; expected one of {', '.join(MESSAGE_ROLES)}", f"{where}.role")
    text = parse_text(item.get("content"), f"{where}.content", "\n")
    return {"role": "system" if role == "developer" else role, "content": text}


def _resolved(item: JsonObject, where: str, earlier: Earlier) -> JsonObject:
    """The item that a reference stands for, and any other item itself."""
    if item.get("type") != "item_reference":
        return item
    id = required(item, "id", str, where)
    answer_id = _answer_id({"id": id, "type": "function_call" if id.startswith("fc_") else None})
    messages = earlier(answer_id) if answer_id else None
    found: list[Any] = output_items(messages[-1], answer_id or "", "stop") if messages else []
    for candidate in found:
        if candidate["id"] == id:
            return dict(candidate)
    raise BadRequest(f"{where}.id: no item {id!r} in this session; send the item itself", f"{where}.id")


def _answer_id(item: JsonObject) -> str | None:
    """The id of the answer that an item is of; None for items without an id."""
    _, _, id = str(item.get("id") or "").partition("_")
    if item.get("type") == "function_call":
        id = id.rpartition("_")[0]
    return id or None
