"""The list of models, as OpenAI's and Anthropic's packages read it. Pure."""

from collections.abc import Sequence

from agent_runtime.proxy.chat import ErrorKind, JsonObject, Refused

_UNKNOWN_DATE = "1970-01-01T00:00:00Z"


def models_body(names: Sequence[str], wanted: str, *, anthropic: bool) -> JsonObject:
    """Return the list, or the entry of the `wanted` name if it is not empty. Raises Refused."""
    entries = [_anthropic_entry(name) if anthropic else _openai_entry(name) for name in names]
    if wanted:
        for entry in entries:
            if entry["id"] == wanted:
                return entry
        raise unknown_model(wanted, names)
    if not anthropic:
        return {"object": "list", "data": entries}
    return {"data": entries, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def unknown_model(wanted: str, names: Sequence[str]) -> Refused:
    message = f"model {wanted!r} is not served in this session; use {' or '.join(names)}"
    return Refused(ErrorKind.MODEL_NOT_FOUND, message, "model")


def _openai_entry(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agent-rollouts"}


def _anthropic_entry(name: str) -> JsonObject:
    return {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_DATE, "lifecycle": "active"}
