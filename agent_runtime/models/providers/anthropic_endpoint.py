"""A model behind Anthropic's Messages API; conversations use OpenAI's chat format in this engine."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.models.answers import MALFORMED, arrived, decoded_object, token_count
from agent_runtime.models.base import ModelConfigError, ModelError, ModelReply, ModelRequest
from agent_runtime.models.http_client import CallOptions, JsonClient
from agent_runtime.models.providers.openai_endpoint import CHECK_SECONDS, CHECK_TRIES, refused
from rollout_api.model import Endpoint
from rollout_api.records import Message, Usage

PATH = "/messages"
API_VERSION = "2023-06-01"  # still the latest version
DEFAULT_MAX_TOKENS = 4096  # the API requires a limit; all its models accept this one
EMPTY_TEXT = "(no text)"  # the API refuses messages without text that is more than white space

TAKEN = frozenset({"metadata", "output_config", "service_tier", "thinking", "top_k"})
"""Fields of `Sampling.extra` that the API has."""
COUNTED = frozenset({"messages", "model", "system", "tools"})
"""Fields that `count_tokens` needs."""

FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


class AnthropicEndpoint:
    """A `Model`. The API returns no token ids and accepts no seed."""

    token_capture = "TextOnly"

    def __init__(self, endpoint: Endpoint, api_key: str | None, key_origin: str) -> None:
        self.name = endpoint.name
        headers = {"anthropic-version": API_VERSION} | ({"x-api-key": api_key} if api_key else {})
        self._client = JsonClient(endpoint.base_url, headers, key_origin)
        self._seconds = float(endpoint.call_seconds)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return one answer; see `Model.complete`."""
        options = CallOptions(self._seconds, health=request.health)
        answer = await self._client.call("POST", PATH, self._body(request), options)
        if answer.status != 200:
            raise await refused(self._client, PATH, self.name, answer)
        return parse_answer(answer.payload, self._client.base_url)

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """See `SelectiveModel`: the API refuses fields that it does not have."""
        return [name for name in fields if name not in TAKEN]

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See `TokenCounter`."""
        body = {name: value for name, value in self._body(request).items() if name in COUNTED}
        answer = await self._client.call("POST", f"{PATH}/count_tokens", body, CallOptions(self._seconds, tries=1))
        count = answer.payload.get("input_tokens") if isinstance(answer.payload, Mapping) else None
        return count if answer.status == 200 and isinstance(count, int) else None

    async def check(self) -> None:
        """Request an answer of one token. Raises ModelError."""
        body = {"model": self.name, "max_tokens": 1, "messages": [{"role": "user", "content": "Say ok."}]}
        options = CallOptions(min(self._seconds, CHECK_SECONDS), CHECK_TRIES)
        answer = await self._client.call("POST", PATH, body, options)
        if answer.status != 200:
            error = await refused(self._client, PATH, self.name, answer)
            raise ModelConfigError(error.reason, error.message)
        parse_answer(answer.payload, self._client.base_url)

    async def close(self) -> None:
        await self._client.close()

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        sampling = request.sampling
        system, messages = to_anthropic(request.messages)
        limit = request.answer_limit
        body = {
            "model": self.name,
            "messages": messages,
            "max_tokens": DEFAULT_MAX_TOKENS if limit is None else limit,
            "system": system or None,
            "tools": [tool_to_anthropic(tool) for tool in request.tools] or None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_sequences": sampling.stop or None,
        }
        return {name: value for name, value in body.items() if value is not None} | sampling.extra


def tool_to_anthropic(definition: Mapping[str, Any]) -> dict[str, Any]:
    function = definition["function"]
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }


def to_anthropic(messages: Sequence[Message]) -> tuple[str, list[dict[str, Any]]]:
    """Return the system prompt, and the conversation with alternating roles: tool results are user messages there."""
    system: list[str] = []
    translated: list[dict[str, Any]] = []
    for message in messages:
        role, blocks = _blocks(message)
        if role == "system":
            system.extend(block["text"] for block in blocks)
        elif translated and translated[-1]["role"] == role:
            translated[-1]["content"].extend(blocks)
        else:
            translated.append({"role": role, "content": blocks})
    for message in translated:
        if not message["content"]:
            message["content"].append({"type": "text", "text": EMPTY_TEXT})
    return "\n\n".join(system), translated


def _blocks(message: Message) -> tuple[str, list[dict[str, Any]]]:
    role, content = message["role"], message.get("content") or ""
    text: list[dict[str, Any]] = [{"type": "text", "text": content}] if content.strip() else []
    if role == "tool":
        return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
    if role != "assistant":
        return "system" if role in ("system", "developer") else "user", text
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _input(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls") or []
    ]
    # With extended thinking the API requires its signed blocks first.
    return "assistant", [*message.get("thinking_blocks", []), *text, *calls]


def _input(arguments: str) -> dict[str, Any]:
    decoded = decoded_object(arguments or "{}")
    return {MALFORMED: arguments} if decoded is None else decoded


def parse_answer(payload: Any, source: str) -> ModelReply:
    """Convert an answer of the Messages API into OpenAI's format. Raises ModelError (BadResponse)."""
    blocks = payload.get("content") if isinstance(payload, Mapping) else None
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ModelError("BadResponse", f"{source}: content: expected a list of blocks, got {str(payload)[:200]}")
    with arrived("BadResponse", f"{source}: the answer cannot be read"):
        return _reply(payload, blocks, source)


def _reply(payload: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], source: str) -> ModelReply:
    try:
        message: Message = {
            "role": "assistant",
            "content": "".join(block["text"] for block in blocks if block["type"] == "text") or None,
        }
        thinking = [dict(block) for block in blocks if block["type"] in ("thinking", "redacted_thinking")]
        calls = [
            {
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
            }
            for block in blocks
            if block["type"] == "tool_use"
        ]
        usage = _usage(payload.get("usage") or {})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            "BadResponse", f"{source}: a block of content or usage is incomplete ({error!r}): {blocks!r:.200}"
        ) from None
    if calls:
        message["tool_calls"] = calls
    if thinking:
        message["thinking_blocks"] = thinking
        message["reasoning_content"] = "".join(block.get("thinking", "") for block in thinking)
    reason = str(payload.get("stop_reason") or "end_turn")
    return ModelReply(
        message=message,
        finish_reason=FINISH_REASONS.get(reason, reason),
        model=str(payload.get("model") or ""),
        usage=usage,
        stop_sequence=payload.get("stop_sequence"),
    )


def _usage(usage: Mapping[str, Any]) -> Usage:
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    new, cached, stored, written = (token_count(usage.get(name)) for name in names)
    return Usage(prompt_tokens=new + cached + stored, completion_tokens=written, cached_tokens=cached)
