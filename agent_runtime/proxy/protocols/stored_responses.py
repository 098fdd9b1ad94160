"""Recorded answers in the form of OpenAI's Responses: the response itself, and the items of its input. Pure."""

from collections.abc import Sequence
from urllib.parse import parse_qs

from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, ErrorKind, JsonObject, Refused
from agent_runtime.proxy.http import whole_number
from agent_runtime.proxy.protocols.openai_responses import ECHOED, answer_id, instructed
from agent_runtime.proxy.protocols.responses_items import output_items, whole_response
from rollout_api.records import Message

DEFAULT_LIMIT, MOST_LIMIT = 20, 100
"""Items of one page: the API's own values."""


def stored_response(
    id: str, model: str, answer: ChatAnswer, messages: Sequence[Message], tools: Sequence[JsonObject]
) -> JsonObject:
    """Return the response. Fields of its request that are not recorded have their defaults."""
    functions = [{"type": "function", "strict": None, "parameters": None, **tool["function"]} for tool in tools]
    echo = ECHOED | {"instructions": messages[0]["content"] if instructed(id) else None, "tools": functions}
    suffix = id.removeprefix(f"resp_{answer_id(id)}")
    request = ChatRequest(model=model, messages=list(messages), extra={"echo": echo, "suffix": suffix})
    return whole_response(request, answer, output_items(answer.reply.message, answer.id, answer.reply.finish_reason))


def input_items(id: str, messages: Sequence[Message], query: str) -> JsonObject:
    """Return one page of the items of a response's input, the newest first unless `order=asc`. Raises BadRequest."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = whole_number(asked.get("limit", str(DEFAULT_LIMIT)))
    if limit is None or not 1 <= limit <= MOST_LIMIT:
        raise BadRequest(f"limit: expected 1 to {MOST_LIMIT}, got {asked['limit']!r:.100}", "limit")
    head = answer_id(id)
    items = [item for i, message in enumerate(messages[instructed(id) :]) for item in _items(message, f"{head}-in{i}")]
    if asked.get("order", "desc") == "desc":
        items.reverse()
    if (after := asked.get("after")) is not None:
        position = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if position is None:
            raise BadRequest(f"after: this response has no item {after!r:.100}", "after")
        del items[: position + 1]
    page = items[:limit]
    ids = [item["id"] for item in page] or [""]
    return {"object": "list", "data": page, "has_more": len(items) > limit, "first_id": ids[0], "last_id": ids[-1]}


def _items(message: Message, id: str) -> list[JsonObject]:
    role = message["role"]
    if role == "assistant":
        return output_items(message, id, "stop")
    text = message.get("content") or ""
    if role == "tool":
        result = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
        return [{"id": f"fco_{id}", "status": "completed", **result}]
    content = [{"type": "input_text", "text": text}]
    return [{"id": f"msg_{id}", "type": "message", "role": role, "status": "completed", "content": content}]


def unknown_response(id: str) -> Refused:
    return Refused(ErrorKind.NOT_FOUND, f"{id!r:.100} is not a response of this session", "response_id")
