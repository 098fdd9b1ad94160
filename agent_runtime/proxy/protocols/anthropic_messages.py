"""Anthropic's Messages (docs.anthropic.com/en/api/messages), whole and streamed. Pure.

Messages have content blocks, and tool results are user messages.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Earlier,
    ErrorKind,
    JsonObject,
    StreamedText,
    sse,
)
from agent_runtime.proxy.conversation import assistant, decoded_arguments, reasoning
from agent_runtime.proxy.protocols.fields import (
    ENGINE_SAMPLING,
    check_known,
    each,
    given,
    objects,
    refuse,
    required,
    sampling,
    typed,
)
from rollout_api.records import Message

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
"""The API's own message, by which agents detect that they must shorten the conversation."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def anthropic_error(kind: ErrorKind, message: str) -> JsonObject:
    """Return the body of an error; `code` is our addition, because the API's types do not distinguish kinds of 400."""
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
    """See `Encoder`. Thinking follows the text if it is only known at the end."""

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


BILLING_HEADER = "x-anthropic-billing-header:"
"""Prefix of the first line of Claude Code's system prompt, for Anthropic's billing. The line differs in every request,
so it is removed; otherwise requests would not extend earlier conversations. vLLM removes it as well
(vllm-project/vllm#36829).
"""

PASSED = ENGINE_SAMPLING
HONOURED = frozenset(
    {
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "output_format",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_p",
    }
)
IGNORED = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
REFUSED = {
    "container": "code execution is only available at Anthropic; leave it out",
    "mcp_servers": "only the client can call MCP servers; leave it out",
}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessages:
    """A `Translation`."""

    name = "messages"
    path = "/messages"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        check_known(body, PASSED | HONOURED | IGNORED | REFUSED.keys())
        refuse(body, REFUSED)
        required(body, "max_tokens", int)
        thinking = given(body, "thinking", dict, {}).get("type", "disabled")
        return ChatRequest(
            model=required(body, "model", str),
            messages=_system(body.get("system")) + _conversation(body),
            tools=each(body.get("tools"), "tools", _tool),
            sampling=sampling(
                body, max_tokens=("max_tokens",), stop="stop_sequences", extra=_sampled_otherwise(body), passed=PASSED
            ),
            stream=given(body, "stream", bool, False),
            extra={"thinking": thinking != "disabled"},
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        head = answer_head(request, answer.id)
        delta, counts = answer_tail(answer.reply)
        content = answer_blocks(answer, thinking=request.extra["thinking"])
        return head | {"content": content, "usage": head["usage"] | counts} | delta

    def encoder(self, request: ChatRequest, id: str, created: int) -> AnthropicEncoder:
        return AnthropicEncoder(request, id)

    def error(self, kind: ErrorKind, message: str, param: str | None = None) -> JsonObject:
        """Return the body of an error; the API names the field only in the message."""
        return anthropic_error(kind, message)


def answer_blocks(answer: ChatAnswer, *, thinking: bool) -> list[JsonObject]:
    """Return the content of an answer. Thinking is included if the client requested it, although clients drop thinking
    without a signature.
    """
    reply = answer.reply
    thought = reasoning(reply.message) if thinking else None
    return [
        *([{"type": "thinking", "thinking": thought, "signature": answer.id}] if thought else []),
        *([{"type": "text", "text": reply.text, "citations": None}] if reply.text else []),
        *(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": decoded_arguments(call.arguments)}
            for call in reply.tool_calls
        ),
    ]


def _system(system: Any) -> list[Message]:
    texts = [system] if isinstance(system, str) else each(system, "system", _text)
    meant = [text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text for text in texts]
    prompt = "\n".join(filter(None, meant))
    return [{"role": "system", "content": prompt}] if prompt else []


def _conversation(body: Mapping[str, Any]) -> list[Message]:
    messages = objects(required(body, "messages", list), "messages")
    if not messages:
        raise BadRequest("messages: at least one message is required", "messages")
    if messages[-1].get("role") == "assistant":
        raise BadRequest(
            "messages: the last message is the assistant's, which this model cannot continue; "
            "end the conversation with a user message",
            "messages",
        )
    return list(chain.from_iterable(each(messages, "messages", _messages)))


def _messages(message: JsonObject, where: str) -> list[Message]:
    """Return the chat messages of one message: tool results are user messages here."""
    role = required(message, "role", str, where)
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, f"{where}.content")
    if role == "assistant":
        return [_answer(blocks, f"{where}.content")]
    if role not in ("user", "system"):
        raise BadRequest(f"{where}.role: {role!r}; expected user or assistant", f"{where}.role")
    parsed: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        path = f"{where}.content[{i}]"
        if block.get("type") == "tool_result":
            parsed.extend(_said(role, texts))
            texts = []
            id = required(block, "tool_use_id", str, path)
            parsed.append({"role": "tool", "content": _result(block.get("content"), path), "tool_call_id": id})
        else:
            texts.append(_text(block, path))
    return [*parsed, *_said(role, texts)]


def _said(role: str, texts: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": "\n".join(texts)}] if texts else []


def _answer(blocks: Sequence[JsonObject], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        path = f"{where}[{i}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(required(block, "thinking", str, path))
            case "redacted_thinking":
                pass  # encrypted: cannot be read here
            case "tool_use":
                function = {
                    "name": required(block, "name", str, path),
                    "arguments": json.dumps(required(block, "input", dict, path), ensure_ascii=False),
                }
                calls.append({"id": required(block, "id", str, path), "type": "function", "function": function})
            case _:
                texts.append(_text(block, path))
    thought = "".join(thoughts)
    return assistant("".join(texts), calls) | ({"reasoning_content": thought} if thought else {})


def _result(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(each(typed(content, list, f"{where}.content"), f"{where}.content", _text))


def _text(block: JsonObject, where: str) -> str:
    kind = required(block, "type", str, where)
    if kind != "text":
        raise BadRequest(f"{where}: a block of type {kind!r}; this model reads text only", where)
    return required(block, "text", str, where)


def _tool(tool: JsonObject, where: str) -> JsonObject:
    if tool.get("type", "custom") != "custom":
        raise BadRequest(
            f"{where}.type: {tool['type']!r}; only tools with an input_schema are supported", f"{where}.type"
        )
    function: JsonObject = {"name": required(tool, "name", str, where)}
    if tool.get("description") is not None:
        function["description"] = required(tool, "description", str, where)
    return {"type": "function", "function": function | {"parameters": required(tool, "input_schema", dict, where)}}


def _sampled_otherwise(body: Mapping[str, Any]) -> JsonObject:
    """Return sampling fields with another format in chat completions, by their names there."""
    extra: JsonObject = {}
    if choice := given(body, "tool_choice", dict, {}):
        kind = required(choice, "type", str, "tool_choice")
        if kind == "tool":
            name = required(choice, "name", str, "tool_choice")
            extra["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif kind not in TOOL_CHOICES:
            raise BadRequest(f"tool_choice.type: {kind!r}; expected auto, any, tool or none", "tool_choice.type")
        elif kind != "auto":
            extra["tool_choice"] = TOOL_CHOICES[kind]
        if choice.get("disable_parallel_tool_use"):
            extra["parallel_tool_calls"] = False
    config = given(body, "output_config", dict, {})
    if config.get("effort"):
        extra["reasoning_effort"] = config["effort"]
    form = config.get("format") or body.get("output_format")
    if form is not None:
        schema = required(typed(form, dict, "output_config.format"), "schema", dict, "output_config.format")
        extra["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return extra
