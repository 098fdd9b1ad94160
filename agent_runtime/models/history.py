"""An answer as it can be sent back: what a server gave out, another call of it may still refuse. Pure."""

import json
from typing import Any

from agent_runtime.models.base import ModelReply
from rollout_api.nesting import too_deep
from rollout_api.records import Message

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
