"""The events of a streamed message (docs.anthropic.com/en/docs/build-with-claude/streaming), and what they share with a
whole one. Pure."""

import json
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import ChatAnswer, ChatRequest, ErrorKind, JsonObject, sse
from agent_runtime.proxy.conversation import decoded_arguments, reasoning
from agent_runtime.proxy.protocols.streamed_text import StreamedText

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TOO_LONG = "prompt is too long"
"""How the API words it; agents look for these words to know that they have to shorten the conversation."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def anthropic_error(kind: ErrorKind, message: str) -> JsonObject:
    """The body of an error; `code` is ours, for the API's types tell no kinds of 400 apart."""
    if kind is ErrorKind.CONTEXT_EXCEEDED and TOO_LONG not in message:
        message = f"{TOO_LONG}: {message}"
    type_ = ERROR_TYPES.get(kind.status, "api_error")
    return {"type": "error", "error": {"type": type_, "message": message, "code": kind.code}}


def answer_head(request: ChatRequest, id: str) -> JsonObject:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }


def answer_tail(reply: ModelReply) -> tuple[JsonObject, JsonObject]:
    """Why the answer ended, and counts of tokens."""
    reason = "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
    counted = reply.usage
    counts = {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }
    if reason == "stop" and reply.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_sequence}, counts
    return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}, counts


class AnthropicEncoder:
    """See `Encoder`. Thinking that is known only at the end follows the text then."""

    def __init__(self, request: ChatRequest, id: str) -> None:
        self._request, self._id = request, id
        self._sent = StreamedText()
        self._blocks = 0
        self._text_open = False

    def start(self) -> bytes:
        return _event("message_start", message=answer_head(self._request, self._id))

    def text(self, piece: str) -> bytes:
        self._sent.add(piece)
        return self._text(piece)

    def end(self, answer: ChatAnswer) -> bytes:
        reply = answer.reply
        thought = reasoning(reply.message) if self._request.extra["thinking"] else None
        before = self._thinking(thought) if thought and not self._text_open else b""
        text = self._end_text(reply.text)
        behind = self._thinking(thought) if thought and not before else b""
        calls = b"".join([self._tool_use(call.id, call.name, call.arguments) for call in reply.tool_calls])
        delta, counts = answer_tail(reply)
        tail = _event("message_delta", delta=delta, usage=counts) + _event("message_stop")
        return before + text + behind + calls + tail

    def error(self, kind: ErrorKind, message: str) -> bytes:
        return sse(anthropic_error(kind, message), "error")

    def _text(self, piece: str) -> bytes:
        head = b"" if self._text_open else _start(self._blocks, {"type": "text", "text": "", "citations": None})
        self._text_open = True
        return head + _delta(self._blocks, "text_delta", text=piece)

    def _end_text(self, text: str) -> bytes:
        rest = self._sent.rest(text)
        sent = self._text(rest) if rest else b""
        if not self._text_open:
            return b""
        self._text_open = False
        return sent + self._stop()

    def _thinking(self, thought: str) -> bytes:
        return (
            _start(self._blocks, {"type": "thinking", "thinking": "", "signature": ""})
            + _delta(self._blocks, "thinking_delta", thinking=thought)
            + _delta(self._blocks, "signature_delta", signature=self._id)
            + self._stop()
        )

    def _tool_use(self, id: str, name: str, arguments: str) -> bytes:
        partial = json.dumps(decoded_arguments(arguments), ensure_ascii=False)
        return (
            _start(self._blocks, {"type": "tool_use", "id": id, "name": name, "input": {}})
            + _delta(self._blocks, "input_json_delta", partial_json=partial)
            + self._stop()
        )

    def _stop(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _start(index: int, block: JsonObject) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, kind: str, **fields: Any) -> bytes:
    return _event("content_block_delta", index=index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
