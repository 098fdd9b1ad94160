"""Anthropic's Messages (docs.anthropic.com/en/api/messages), whole and streamed. Pure.

Messages have content blocks, and tool results are user messages.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from agent_runtime.models.answers import reasoning_of
from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import (
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
from agent_runtime.proxy.conversation import assistant, decoded_arguments
from agent_runtime.proxy.protocols.fields import (
    ENGINE_SAMPLING,
    Fields,
    Notes,
    each,
    fitting_choice,
    given,
    objects,
    required,
    sampling,
    typed,
    words,
)
from agent_runtime.proxy.protocols.openai_chat import left_out
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


def answer_head(request: ChatRequest, id: str, prompt_tokens: int = 0) -> JsonObject:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens,
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
        "output_tokens_details": {"thinking_tokens": counted.reasoning_tokens},
    }
    if reason == "stop" and reply.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_sequence}, counts
    return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}, counts


class AnthropicEncoder:
    """See `Encoder`. Thinking follows the text if it is only known at the end."""

    def __init__(self, request: ChatRequest, id: str) -> None:
        self._request, self._id = request, id
        self._sent, self._thought = StreamedText(), StreamedText()
        self._blocks = 0
        self._open: str | None = None
        """Type of the block to which pieces are added."""

    def start(self, prompt_tokens: int) -> bytes:
        return _event("message_start", message=answer_head(self._request, self._id, prompt_tokens))

    def reasoning(self, piece: str) -> bytes:
        """Return the piece; nothing if the client did not ask for thinking, or once the text has begun, because clients
        expect thinking first.
        """
        return b"" if self._sent.whole or not self._request.extra["thinking"] else self._think(piece)

    def _think(self, piece: str) -> bytes:
        self._thought.add(piece)
        return self._begin("thinking", {"thinking": "", "signature": ""}) + self._delta(
            "thinking_delta", thinking=piece
        )

    def text(self, piece: str) -> bytes:
        self._sent.add(piece)
        return self._begin("text", {"text": "", "citations": None}) + self._delta("text_delta", text=piece)

    def ping(self) -> bytes:
        return _event("ping")

    def end(self, answer: ChatAnswer) -> bytes:
        reply = answer.reply
        thought = reasoning_of(reply.message) if self._request.extra["thinking"] else ""
        rest = self._thought.missing(thought)
        before = self._think(rest) if rest and not self._sent.whole else b""
        unsent = self._sent.missing(reply.text)
        text = self.text(unsent) if unsent else b""
        behind = self._think(rest) if rest and not self._thought.whole else b""
        content = before + text + behind + self._close()
        calls = b"".join([self._tool_use(call.id, call.name, call.arguments) for call in reply.tool_calls])
        delta, counts = answer_tail(reply)
        tail = _event("message_delta", delta=delta, usage=counts) + _event("message_stop")
        return content + calls + tail

    def _begin(self, kind: str, block: JsonObject) -> bytes:
        """Return the beginning of a block of this type, if another one or none is open."""
        if self._open == kind:
            return b""
        before, self._open = self._close(), kind
        return before + _event("content_block_start", index=self._blocks, content_block={"type": kind, **block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        # Clients drop thinking without a signature.
        signed = self._delta("signature_delta", signature=self._id) if self._open == "thinking" else b""
        self._open, self._blocks = None, self._blocks + 1
        return signed + _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **fields})

    def _tool_use(self, id: str, name: str, arguments: str) -> bytes:
        partial_json = json.dumps(decoded_arguments(arguments), ensure_ascii=False)
        return (
            self._begin("tool_use", {"id": id, "name": name, "input": {}})
            + self._delta("input_json_delta", partial_json=partial_json)
            + self._close()
        )

    def error(self, kind: ErrorKind, message: str) -> bytes:
        return sse(anthropic_error(kind, message), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


BILLING_HEADER = "x-anthropic-billing-header:"
"""Prefix of the first line of Claude Code's system prompt, for Anthropic's billing. The line differs in every request,
so it is removed; otherwise requests would not extend earlier conversations. vLLM removes it as well
(vllm-project/vllm#36829).
"""

FIELDS = Fields(
    honoured=words(
        "max_tokens messages model output_config output_format stop_sequences stream system temperature thinking "
        "tool_choice tools top_p"
    ),
    passed=ENGINE_SAMPLING,
    ignored=words(
        "betas billing_policy cache_control client_metadata diagnostics inference_geo metadata service_tier speed "
        "user_profile_id workspace_id"
    ),
    dropped={
        "compaction": "the conversation is sent to the model as it is",
        "container": "code execution is only available at Anthropic",
        "context_management": "the conversation is sent to the model as it is",
        "fallback_credit_token": "a session has one model",
        "fallbacks": "a session has one model",
        "mcp_servers": "only the client can call MCP servers",
    },
    refused={"thread": "conversations are not stored here; send all messages"},
)
CLIENT_TOOLS: Mapping[str, JsonObject] = {
    "bash": {
        "description": "Run a command in a persistent bash session of the client.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command to run."},
                "restart": {"type": "boolean", "description": "Restart the session instead."},
            },
        },
    },
    "text_editor": {
        "description": "View, create and edit text files of the client.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": {"type": "string", "description": "Path of the file, or of the folder to view."},
                "view_range": {"type": "array", "items": {"type": "integer"}, "description": "First and last line."},
                "file_text": {"type": "string", "description": "Contents of the file to create."},
                "old_str": {"type": "string", "description": "Text to replace; it occurs exactly once."},
                "new_str": {"type": "string", "description": "Text that replaces it."},
                "insert_line": {"type": "integer", "description": "Line after which to insert."},
                "insert_text": {"type": "string", "description": "Text to insert."},
            },
            "required": ["command", "path"],
        },
    },
}
"""Anthropic's own tools that the client runs: its models know them without a definition, others do not. By type without
its date.
"""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessages:
    """A `Translation`."""

    name = "messages"
    path = "/messages"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        notes = Notes()
        FIELDS.check(body, notes)
        required(body, "max_tokens", int)
        thinking = given(body, "thinking", dict, {}).get("type", "disabled")
        tools = each(body.get("tools"), "tools", partial(_tool, notes=notes))
        extra = fitting_choice(_sampled_otherwise(body), tools, notes)
        return ChatRequest(
            model=required(body, "model", str),
            messages=_system(body.get("system")) + _conversation(body, notes),
            tools=tools,
            sampling=sampling(
                body, max_tokens=("max_tokens",), stop="stop_sequences", extra=extra, passed=FIELDS.passed
            ),
            stream=given(body, "stream", bool, False),
            extra={"thinking": thinking != "disabled"},
            notes=notes.all,
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
    thought = reasoning_of(reply.message) if thinking else None
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


def _conversation(body: Mapping[str, Any], notes: Notes) -> list[Message]:
    messages = objects(required(body, "messages", list), "messages")
    if not messages:
        raise BadRequest("messages: at least one message is required", "messages")
    if messages[-1].get("role") == "assistant":
        raise BadRequest(
            "messages: the last message is the assistant's, which this model cannot continue; "
            "end the conversation with a user message",
            "messages",
        )
    return list(chain.from_iterable(each(messages, "messages", partial(_messages, notes=notes))))


def _messages(message: JsonObject, where: str, notes: Notes) -> list[Message]:
    """Return the chat messages of one message: tool results are user messages here."""
    role = required(message, "role", str, where)
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, f"{where}.content")
    if role == "assistant":
        return [_answer(blocks, f"{where}.content", notes)]
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
            parsed.append({"role": "tool", "content": _result(block, path, notes), "tool_call_id": id})
        else:
            texts.append(_text(block, path))
    return [*parsed, *_said(role, texts)]


def _said(role: str, texts: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": "\n".join(texts)}] if texts else []


def _answer(blocks: Sequence[JsonObject], where: str, notes: Notes) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        path = f"{where}[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_text(block, path))
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
            case kind:
                notes.drop(NoteKind.CONTENT, path, f"a block of type {kind!s:.60} is not supported")
    thought = "".join(thoughts)
    return assistant("".join(texts), calls) | ({"reasoning_content": thought} if thought else {})


ERROR_PREFIX = "Error: "
"""Marks the result of a failed tool, because chat completions have no field for it."""


def _result(block: JsonObject, where: str, notes: Notes) -> str:
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(each(content, f"{where}.content", partial(_text, notes=notes)))
    text = "" if content is None else typed(content, str, f"{where}.content")
    # Most clients' own messages say it already.
    says_so = "error" in text[:40].lower()
    return text if not block.get("is_error") or says_so else ERROR_PREFIX + text


def _text(block: JsonObject, where: str, notes: Notes | None = None) -> str:
    """Return the text of a block. With `notes`, a text replaces any other block."""
    kind = required(block, "type", str, where)
    if kind == "text":
        return required(block, "text", str, where)
    if kind == "document" and given(block, "source", dict, {}).get("type") == "text":
        return required(block["source"], "data", str, f"{where}.source")
    if notes is None:
        raise BadRequest(f"{where}: a block of type {kind!r}; this model reads text only", where)
    return left_out(kind, where, notes)


def _tool(tool: JsonObject, where: str, notes: Notes) -> JsonObject | None:
    """Parse a tool definition; None for a tool that is only available at Anthropic."""
    kind = given(tool, "type", str, "custom")
    name: str = required(tool, "name", str, where) if kind == "custom" or tool.get("name") is not None else kind
    if kind != "custom":
        if (known := CLIENT_TOOLS.get(kind.rpartition("_")[0])) is not None:
            return {"type": "function", "function": {"name": name, **known}}
        notes.drop(
            NoteKind.TOOL, where, f"{kind:.60}; only tools with an input_schema, bash and text_editor are supported"
        )
        return None
    function: JsonObject = {"name": name}
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
