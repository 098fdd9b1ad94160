"""Items and events of OpenAI's Responses (platform.openai.com/docs/api-reference/responses-streaming). Pure.

One answer has up to three kinds of items: reasoning, a message, function calls. Their ids derive from the answer's, so
that returned items can be combined again.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from agent_runtime.models.answers import reasoning_of
from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import (
    PING,
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Earlier,
    ErrorKind,
    JsonObject,
    NoteKind,
    StreamedText,
    sse,
)
from agent_runtime.proxy.conversation import assistant
from agent_runtime.proxy.protocols.fields import Notes, objects, required
from agent_runtime.proxy.protocols.openai_chat import custom_arguments, custom_text, function_call, parse_text
from agent_runtime.proxy.protocols.openai_errors import openai_error
from rollout_api.records import Message

ANSWER_PREFIX = "resp_"
COMPACTION = "compaction"
MESSAGE_ROLES = ("user", "system", "developer", "assistant")

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons of incomplete answers, by the finish reason of chat completions."""


def reasoning_item(id: str, text: str) -> JsonObject:
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


def call_items(id: str, message: Message, custom: Collection[str] = ()) -> list[JsonObject]:
    """Return the items of an answer's calls. `custom` are the names of the custom tools."""
    items: list[JsonObject] = []
    for position, call in enumerate(ModelReply(message, "").tool_calls):
        item = {"status": "completed", "call_id": call.id, "name": call.name}
        if call.name in custom:
            text = custom_text(call.arguments)
            items.append({"id": f"ctc_{id}_{position}", "type": "custom_tool_call", **item, "input": text})
        else:
            items.append({"id": f"fc_{id}_{position}", "type": "function_call", **item, "arguments": call.arguments})
    return items


def output_items(message: Message, id: str, finish_reason: str, custom: Collection[str] = ()) -> list[JsonObject]:
    """Return all items of an answer with this `id`. An empty answer still has a message, which can be sent back."""
    thought, text, calls = reasoning_of(message), ModelReply(message, "").text, call_items(id, message, custom)
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
    return bare_response(request, answer.id, answer.created) | {
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "usage": response_usage(answer.reply),
    }


def response_usage(reply: ModelReply) -> JsonObject:
    counted = reply.usage
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


class _Answer:
    """Items of one answer that are being combined."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[JsonObject] = []

    def takes(self, kind: str) -> bool:
        """Whether the next item belongs to this answer: the API writes them in this order."""
        return kind in CALLS or not (self.calls or (self.texts if kind == "message" else self.thoughts))

    def message(self) -> Message:
        thought = {"reasoning_content": "".join(self.thoughts)} if self.thoughts else {}
        return assistant("".join(self.texts), self.calls) | thought


CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")


def parse_items(items: Sequence[JsonObject], where: str, earlier: Earlier, notes: Notes) -> list[Message]:
    """Return the messages of items. Items of tools that are not supported are dropped. Raises BadRequest."""
    parsed: list[Message | _Answer] = []
    last: _Answer | None = None
    for i, item in enumerate(items):
        path = f"{where}[{i}]"
        item = _resolved(item, path, earlier)
        kind = item.get("type") or "message"
        if kind in RESULTS:
            output = parse_text(item.get("output"), f"{path}.output", "\n", notes)
            parsed.append({"role": "tool", "content": output, "tool_call_id": required(item, "call_id", str, path)})
        elif kind == COMPACTION:
            parsed.append({"role": "user", "content": required(item, "encrypted_content", str, path)})
        elif kind == "message" and item.get("role") != "assistant":
            parsed.append(_message(item, path))
        elif kind in ("message", "reasoning", *CALLS):
            key = _answer_id(item)
            follows = bool(parsed) and parsed[-1] is last
            # Clients may put a call's result directly after the call, before the answer's next call.
            if last is None or not ((follows and last.takes(kind)) or (key is not None and key == last.key)):
                last = _Answer()
                parsed.append(last)
            last.key = key if last.key is None else last.key
            _add(last, kind, item, path)
        else:
            notes.drop(NoteKind.CONTENT, path, f"an item of type {kind!s:.60} is not supported")
    return [part.message() if isinstance(part, _Answer) else part for part in parsed]


def _add(answer: _Answer, kind: str, item: JsonObject, where: str) -> None:
    if kind == "message":
        answer.texts.append(parse_text(item.get("content"), f"{where}.content", ""))
    elif kind == "reasoning":
        parts = objects(item.get("content") or item.get("summary") or [], where)
        # Encrypted reasoning cannot be read here.
        answer.thoughts.extend(required(part, "text", str, where) for part in parts)
    else:
        is_custom = kind == "custom_tool_call"
        arguments = required(item, "input" if is_custom else "arguments", str, where)
        answer.calls.append(
            function_call(
                required(item, "call_id", str, where),
                required(item, "name", str, where),
                custom_arguments(arguments) if is_custom else arguments,
            )
        )


def _message(item: JsonObject, where: str) -> Message:
    role = required(item, "role", str, where)
    if role not in MESSAGE_ROLES:
        raise BadRequest(f"{where}.role: {role!r}; expected one of {', '.join(MESSAGE_ROLES)}", f"{where}.role")
    text = parse_text(item.get("content"), f"{where}.content", "\n")
    return {"role": "system" if role == "developer" else role, "content": text}


def _resolved(item: JsonObject, where: str, earlier: Earlier) -> JsonObject:
    """Return the item of a reference, and any other item unchanged."""
    if item.get("type") != "item_reference":
        return item
    id = required(item, "id", str, where)
    answer_id = _answer_id({"id": id, "type": "function_call" if id.startswith(("fc_", "ctc_")) else None})
    messages = earlier(answer_id) if answer_id else None
    found: list[Any] = output_items(messages[-1], answer_id or "", "stop") if messages else []
    for candidate in found:
        if candidate["id"] == re.sub("^ctc_", "fc_", id):
            return dict(candidate)
    raise BadRequest(f"{where}.id: no item {id!r} in this session; send the item itself", f"{where}.id")


def _answer_id(item: JsonObject) -> str | None:
    """Return the id of the answer to which an item belongs; None for items without an id."""
    _, _, id = str(item.get("id") or "").partition("_")
    if item.get("type") in CALLS:
        id = id.rpartition("_")[0]
    return id or None


class ResponsesEncoder:
    """See `Encoder`. Items are numbered in order of arrival: reasoning that is only known at the end follows the text."""

    def __init__(self, request: ChatRequest, id: str, created: int) -> None:
        self._request, self._id, self._created = request, id, created
        self._sent, self._thought = StreamedText(), StreamedText()
        self._number = 0
        self._output: list[JsonObject] = []
        self._text_begun = self._reasoning_begun = self._reasoning_ended = False

    def start(self, prompt_tokens: int) -> bytes:
        response = bare_response(self._request, self._id, self._created)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def reasoning(self, piece: str) -> bytes:
        """Return the piece; nothing once the text has begun, because an answer has one item of reasoning."""
        return b"" if self._reasoning_ended or self._text_begun else self._think(piece)

    def _think(self, piece: str) -> bytes:
        place = self._place(f"rs_{self._id}")
        head = b""
        if not self._reasoning_begun:
            self._reasoning_begun = True
            item = reasoning_item(self._id, "")
            head = self._added(item | {"content": []}) + self._part("added", item["id"], item["content"][0])
        self._thought.add(piece)
        return head + self._event("response.reasoning_text.delta", **place, delta=piece)

    def text(self, piece: str) -> bytes:
        head = self._end_reasoning() + (b"" if self._text_begun else self._begin_text())
        self._sent.add(piece)
        return head + self._delta(piece)

    def ping(self) -> bytes:
        return PING

    def end(self, answer: ChatAnswer) -> bytes:
        reply = answer.reply
        text, calls = reply.text, call_items(self._id, reply.message, self._request.extra["custom"])
        thought = reasoning_of(reply.message)
        before = b"" if self._text_begun else self._whole_reasoning(thought)
        message = self._end_text(text, reply) if self._text_begun or text or not calls else b""
        behind = self._whole_reasoning(thought)
        called = b"".join([self._whole_call(call) for call in calls])
        return before + message + behind + called + self._completed(answer)

    def _completed(self, answer: ChatAnswer) -> bytes:
        response = whole_response(self._request, answer, self._output)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, kind: ErrorKind, message: str) -> bytes:
        """Return the failed response, which Codex reads, and the error event, which the openai package raises."""
        code = kind.code if kind is ErrorKind.CONTEXT_EXCEEDED else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": message}}
        response = bare_response(self._request, self._id, self._created) | failed
        error = openai_error(kind, message)["error"]
        return self._event("response.failed", response=response) + self._event(
            "error", code=kind.code, message=message, param=None, error=error
        )

    def _begin_text(self) -> bytes:
        self._text_begun = True
        item = message_item(self._id, "", "stop") | {"status": "in_progress", "content": []}
        part = message_item(self._id, "", "stop")["content"][0]
        return self._added(item) + self._part("added", item["id"], part)

    def _delta(self, piece: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(f"msg_{self._id}"), delta=piece, logprobs=[])

    def _end_text(self, text: str, reply: ModelReply) -> bytes:
        head = b"" if self._text_begun else self._begin_text()
        rest = self._sent.rest(text)
        item = message_item(self._id, self._sent.whole, reply.finish_reason)
        whole = self._sent.whole
        return (
            head
            + (self._delta(rest) if rest else b"")
            + self._event("response.output_text.done", **self._place(item["id"]), text=whole, logprobs=[])
            + self._part("done", item["id"], item["content"][0])
            + self._done(item)
        )

    def _whole_reasoning(self, thought: str) -> bytes:
        """Return what is left of the reasoning, and its end; nothing if it has ended."""
        if self._reasoning_ended:
            return b""
        piece = self._thought.missing(thought)
        return (self._think(piece) if piece else b"") + self._end_reasoning()

    def _end_reasoning(self) -> bytes:
        if self._reasoning_ended or not self._reasoning_begun:
            return b""
        self._reasoning_ended = True
        item = reasoning_item(self._id, self._thought.whole)
        return (
            self._event("response.reasoning_text.done", **self._place(item["id"]), text=self._thought.whole)
            + self._part("done", item["id"], item["content"][0])
            + self._done(item)
        )

    def _whole_call(self, item: JsonObject) -> bytes:
        place = {"item_id": item["id"], "output_index": len(self._output)}
        field, kind = (
            ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        )
        value = item[field]
        named = {"name": item["name"]} if field == "arguments" else {}
        return (
            self._added(item | {"status": "in_progress", field: ""})
            + self._event(f"response.{kind}.delta", **place, delta=value)
            + self._event(f"response.{kind}.done", **place, **named, **{field: value})
            + self._done(item)
        )

    def _added(self, item: JsonObject) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _part(self, what: str, item_id: str, part: JsonObject) -> bytes:
        return self._event(f"response.content_part.{what}", **self._place(item_id), part=part)

    def _done(self, item: JsonObject) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, item_id: str) -> JsonObject:
        """Return where a piece belongs; the open item is the next of the output."""
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = sse({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return event
