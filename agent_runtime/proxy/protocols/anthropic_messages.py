"""Anthropic's Messages (docs.anthropic.com/en/api/messages): content blocks instead of messages. Pure."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, Earlier, ErrorKind, JsonObject
from agent_runtime.proxy.conversation import assistant, decoded_arguments, reasoning
from agent_runtime.proxy.protocols.anthropic_events import AnthropicEncoder, answer_head, answer_tail, anthropic_error
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

BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins the first line of Claude Code's system prompt, which is meant for Anthropic's billing and differs in every
request, so that no conversation would extend another; vLLM leaves it out as well (vllm-project/vllm#36829)."""

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
    "container": "code execution runs on Anthropic's side; leave it out",
    "mcp_servers": "MCP servers are called by the client here; leave it out",
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
        """The body of an error; the API names the field in the message alone."""
        return anthropic_error(kind, message)


def answer_blocks(answer: ChatAnswer, *, thinking: bool) -> list[JsonObject]:
    """The content of an answer. Thinking is given to clients that asked for it; clients drop it without a signature."""
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
            "messages: the last message is the assistant's; this model does not go on with a begun answer, "
            "so let the conversation end with a user message",
            "messages",
        )
    return list(chain.from_iterable(each(messages, "messages", _messages)))


def _messages(message: JsonObject, where: str) -> list[Message]:
    """The chat messages that one message stands for: the results of tools are the user's here."""
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
                pass  # encrypted: nobody here can read it
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
            f"{where}.type: {tool['type']!r}; only tools with an input_schema of their own are served", f"{where}.type"
        )
    function: JsonObject = {"name": required(tool, "name", str, where)}
    if tool.get("description") is not None:
        function["description"] = required(tool, "description", str, where)
    return {"type": "function", "function": function | {"parameters": required(tool, "input_schema", dict, where)}}


def _sampled_otherwise(body: Mapping[str, Any]) -> JsonObject:
    """What changes sampling and has another form in chat completions, by its name there."""
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
