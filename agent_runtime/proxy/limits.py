"""Limits of a session. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rollout_api.base import ApiModel, Seconds
from rollout_api.records import StopReason

BODY_BYTES = 64 << 20
"""Larger than the conversation of any current context window, image data included."""

CONVERSATION_BYTES = 512 << 20
"""Recorded conversations stay in memory."""

REPEATED_BYTES = 256
"""Memory of a message that an earlier request had too: its references in lists and in the tree of conversations."""

VALUE_BYTES = 64
"""Memory of an empty Python list or object, the smallest value that one byte of JSON can produce."""

Count = Annotated[int, Field(ge=1)]


class Limits(ApiModel):
    """Limits of a session; None: unlimited."""

    requests: Count | None = None
    """Calls to the model, including failed ones."""
    turns: Count | None = None
    """Answers."""
    tokens: Count | None = None
    """Prompt and completion tokens of all answers."""
    seconds: Seconds | None = None
    """Seconds since the registration."""
    concurrent_calls: Count = 64
    """Calls in progress; further ones wait for a place."""
    body_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = BODY_BYTES
    """Bytes of one request's body."""
    conversation_bytes: Count = CONVERSATION_BYTES
    """Bytes that all requests add to the conversations, including `VALUE_BYTES` for each JSON value. A message that an
    earlier request had counts as `REPEATED_BYTES`.
    """


@dataclass(slots=True)
class Spent:
    """Usage of a session."""

    requests: int = 0
    turns: int = 0
    tokens: int = 0
    conversation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A limit is reached."""

    reason: StopReason
    message: str


def exhausted(limits: Limits, spent: Spent, age_seconds: float) -> Exhausted | None:
    if limits.seconds is not None and age_seconds >= limits.seconds:
        return _over(StopReason.AGENT_TIMEOUT, f"its {limits.seconds} s are used up")
    if limits.turns is not None and spent.turns >= limits.turns:
        return _over(StopReason.MAX_TURNS, f"its {limits.turns} turns are used up")
    if limits.tokens is not None and spent.tokens >= limits.tokens:
        return _over(StopReason.TOKEN_BUDGET, f"its {limits.tokens} tokens are used up")
    if limits.requests is not None and spent.requests >= limits.requests:
        return _over(StopReason.RESOURCE_LIMIT, f"its {limits.requests} requests are used up")
    if spent.conversation_bytes >= limits.conversation_bytes:
        return _over(StopReason.RESOURCE_LIMIT, f"its {limits.conversation_bytes} bytes of conversation are used up")
    return None


def conversation_bytes(added: Any) -> int:
    """Return the size of JSON as counted by `Limits.conversation_bytes`. Not recursive: deep JSON cannot exhaust the
    stack.
    """
    found, values = 0, [added]
    while values:
        value = values.pop()
        found += VALUE_BYTES
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, Mapping):
            found += sum(map(len, value))
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
    return found


def tokens_left(limits: Limits, spent: Spent) -> int | None:
    """Return the most tokens of the next answer; None without a limit."""
    return None if limits.tokens is None else max(1, limits.tokens - spent.tokens)


def _over(reason: StopReason, what: str) -> Exhausted:
    return Exhausted(
        reason, f"this session cannot make further calls: {what} ({reason}). Stop now; retries do not help."
    )
