"""One call of any model implementation: its reply in a form that a record can hold, or an error that says whose it is."""

import json
import math
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelError, ModelReply
from rollout_api.nesting import DEEPEST, too_deep

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
        message = _whole(message)
    is_same = message is reply.message and logprobs is reply.logprobs
    return reply if is_same else replace(reply, message=message, logprobs=logprobs)


def _whole(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {_whole(name): _whole(item) for name, item in value.items()}
    return value
