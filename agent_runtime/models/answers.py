"""Answers of all model implementations, as records can hold them, and as later calls can send them back.

A server may refuse in a conversation what it has given out itself.
"""

import json
import math
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelError, ModelReply
from rollout_api.nesting import DEEPEST, too_deep
from rollout_api.records import Message

LEAST_LOGPROB = -9999.0
"""In place of -inf, which JSON has no number for; vLLM sends the same for it."""


async def answered(call: Awaitable[ModelReply]) -> ModelReply:
    """The reply. Raises ModelError, ContextExceeded and ContentFiltered; an implementation that raises anything else, or
    gives a reply that no record can hold, has failed (ModelFailed).
    """
    try:
        return storable(await call)
    except (ModelError, ContextExceeded, ContentFiltered):
        raise
    except Exception as error:
        raise ModelError("ModelFailed", f"the model raised {type(error).__name__}: {error}") from error


def storable(reply: ModelReply) -> ModelReply:
    """The reply with half surrogate pairs replaced, and with finite logprobs. Raises ValueError where that is impossible."""
    logprobs = reply.logprobs
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        if any(value != -math.inf for value in logprobs if not math.isfinite(value)):
            raise ValueError("a logprob is not a number, expected a number of at most 0")
        logprobs = [value if math.isfinite(value) else LEAST_LOGPROB for value in logprobs]
    message = reply.message
    if too_deep(message):
        raise ValueError(f"the message is nested more than {DEEPEST} levels deep")
    try:
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        message = whole(message)
    is_same = message is reply.message and logprobs is reply.logprobs
    return reply if is_same else replace(reply, message=message, logprobs=logprobs)


def whole(value: Any) -> Any:
    """JSON with halves of surrogate pairs joined, or replaced by `?` where the other half is missing."""
    match value:
        case str():
            joined = value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            return joined.encode(errors="replace").decode()
        case list():
            return [whole(item) for item in value]
        case dict():
            return {whole(name): whole(item) for name, item in value.items()}
    return value


MALFORMED = "malformed_arguments"


def answer_message(reply: ModelReply) -> Message:
    """The assistant message for the next call's conversation: unchanged where the server can take it back.

    Servers decode the arguments of earlier tool calls for their chat template and refuse the whole conversation when one
    is no JSON object; so such arguments go back as text inside of one. A message that is changed
    starts a new branch of the token record, so all others are returned as they are.
    """
    if all(_can_go_back(call) for call in reply.message.get("tool_calls") or []):
        return reply.message
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _decodable(call.arguments)}}
        for call in reply.tool_calls
    ]
    return reply.message | {"tool_calls": calls}


def _can_go_back(call: Any) -> bool:
    match call:
        case {"id": str(), "type": "function", "function": {"name": str(), "arguments": str(arguments)}}:
            return decoded_object(arguments) is not None
    return False


def _decodable(arguments: str) -> str:
    if not arguments:
        return "{}"
    return arguments if decoded_object(arguments) is not None else json.dumps({MALFORMED: arguments})


def decoded_object(arguments: str) -> dict[str, Any] | None:
    """The JSON object in a text; None when it is something else, or nested too deeply to be recorded."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) and not too_deep(decoded) else None
