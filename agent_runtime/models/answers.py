"""Answers of all model implementations, normalised so that they can be recorded and sent back in later calls. A server
may refuse its own answer in a later conversation.
"""

import asyncio
import contextlib
import json
import math
import operator
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelError, ModelReply, ModelRequest
from agent_runtime.models.token_history import answer_record
from rollout_api.nesting import DEEPEST, too_deep
from rollout_api.records import Message

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields in which servers put reasoning: the older name, and vLLM's newer one."""

LEAST_LOGPROB = -9999.0
"""Replaces -inf, which JSON cannot represent; vLLM sends the same value."""

LARGEST_LOGPROB = 1e-3
"""Rounding error of a server that computes in half precision: a probability is at most 1."""

LARGEST_ID = 1 << 31
"""Token ids are smaller: inference servers and trainers store them in 32 bits."""


MAY_PASS: Final = frozenset({
    *("BadResponse", "KeyRefused", "ModelFailed", "ModelNotFound", "Redirected", "UnexpectedStatus"),
})  # fmt: skip
"""Reasons of failures that the front of a server causes now and then, whatever is asked: an error page or half an answer
with status 200, a route or a key that is unknown while a gateway reloads, a status that concerns no request. Statuses that
ask for a retry are repeated by the client.
"""
REPEAT_PAUSES: Final = (0.25, 1.0, 4.0)
"""Seconds between the tries: a gateway reloads within a few. If one call in 20 fails so, one in 160,000 fails four times."""


def token_count(value: Any) -> int:
    """Return a server's count of tokens; 0 if it gives none. It is limited to what databases and spreadsheets can add up.
    Raises TypeError, ValueError, OverflowError for what is no whole number.
    """
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is no whole number")
    return min(max(0, int(value or 0)), 1 << 53)


async def answered(call: Awaitable[ModelReply]) -> ModelReply:
    """Return the reply. Raises ModelError, ContextExceeded and ContentFiltered. An implementation that raises anything
    else, or returns a reply that no record can hold, has failed (ModelFailed).
    """
    try:
        reply = await call
    except (ModelError, ContextExceeded, ContentFiltered):
        raise
    except Exception as error:
        raise ModelError("ModelFailed", f"the model raised {type(error).__name__}: {error}") from error
    with arrived("ModelFailed", "the model's answer cannot be recorded"):
        return storable(reply)


@contextlib.contextmanager
def arrived(reason: str, what: str) -> Iterator[None]:
    """Mark the failure to read an answer that has arrived: the policy wrote that answer, so it is never asked for again,
    and a failure in reading it does not mask the rollout. An error that is no ModelError becomes one with `reason`.
    """
    try:
        yield
    except ModelError as error:
        error.after_tokens = True
        raise
    except Exception as error:
        failure = ModelError(reason, f"{what}: {type(error).__name__}: {error}")
        failure.after_tokens = True
        raise failure from error


async def repeated(
    ask: Callable[[ModelRequest], Awaitable[ModelReply]], request: ModelRequest, may_pass: Collection[str] = MAY_PASS
) -> ModelReply:
    """Return the reply, as `answered` does. After a failure with a reason in `may_pass`, the same request is sent again
    at most three times: one failure is no evidence against the request, which the policy wrote.
    """
    now, health = asyncio.get_running_loop().time, request.health
    began, lost_before, held_before = now(), health.lost_seconds, health.held_seconds
    asked, has_said = heard(request)
    for pause in (*REPEAT_PAUSES, None):
        try:
            reply = await answered(ask(asked))
        except ModelError as error:
            if pause is None or error.reason not in may_pass or error.after_tokens or has_said():
                raise
            health.note(f"{error.reason}: {error.message}")
            await asyncio.sleep(pause)
            # Time on hold is counted for itself.
            health.lost_seconds = lost_before + now() - began - (health.held_seconds - held_before)
        else:
            break
    if health.failing is not None:
        health.note(None)
    return reply


def heard(request: ModelRequest) -> tuple[ModelRequest, Callable[[], bool]]:
    """Return the request, and whether a client has received any text of its answer. Then the call cannot be repeated,
    because another answer would differ.
    """
    said = False

    def watched(say: Callable[[str], None] | None) -> Callable[[str], None] | None:
        if say is None:
            return None

        def watch(piece: str) -> None:
            nonlocal said
            said = True
            say(piece)

        return watch

    asked = replace(request, on_text=watched(request.on_text), on_reasoning=watched(request.on_reasoning))
    return asked, lambda: said


def storable(reply: ModelReply) -> ModelReply:
    """Return the reply with unpaired surrogates replaced and with finite logprobs. Raises ValueError if that is
    impossible, or if a field has the wrong type.
    """
    logprobs = reply.logprobs
    check_tokens((), logprobs or ())
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        logprobs = [value if math.isfinite(value) else LEAST_LOGPROB for value in logprobs]
    message = reply.message
    if too_deep(message):
        raise ValueError(f"the message is nested more than {DEEPEST} levels deep")
    try:
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        message = whole(message)
    is_same = message is reply.message and logprobs is reply.logprobs
    stored = reply if is_same else replace(reply, message=message, logprobs=logprobs)
    try:
        answer_record(stored, turn=0, seconds=0.0, known=())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}, got {first['input']!r:.100}") from None
    check_tokens(reply.prompt_token_ids or ())
    check_tokens(reply.completion_token_ids or ())
    return stored


def check_tokens(ids: Sequence[Any], logprobs: Iterable[float] = ()) -> None:
    """Raise ValueError for a token id that is not one, and for a logprob that is NaN or of a probability above 1."""
    # A prompt may have 100,000 ids in each turn, so the usual case is decided without a loop in Python.
    usual = not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < LARGEST_ID)
    for id in () if usual else ids:
        try:
            known = 0 <= operator.index(id) < LARGEST_ID
        except TypeError:
            known = False
        if not known:
            raise ValueError(f"a token id is {id!r:.100}, expected a whole number from 0 to {LARGEST_ID - 1}")
    for value in logprobs:
        if not value <= LARGEST_LOGPROB:
            raise ValueError(f"a logprob is {value}, expected a number of at most 0")


def whole(value: Any) -> Any:
    """Return JSON with surrogate pairs joined, and unpaired surrogates replaced by `?`."""
    match value:
        case str():
            joined = value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            return joined.encode(errors="replace").decode()
        case list():
            return [whole(item) for item in value]
        case dict():
            return {whole(name): whole(item) for name, item in value.items()}
    return value


def reasoning_of(message: Message) -> str:
    """Return the reasoning of an answer, or an empty string."""
    return next((str(message[name]) for name in REASONING_FIELDS if message.get(name)), "")


MALFORMED = "malformed_arguments"


def answer_message(reply: ModelReply) -> Message:
    """Return the assistant message for the next call's conversation: unchanged if the server can accept it.

    Servers decode the arguments of earlier tool calls for their chat template and refuse the whole conversation if one
    is not a JSON object. So such arguments are wrapped as text in an object. A changed message starts a new branch of
    the token record, so all others are returned unchanged.
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
    """The JSON object in a text; None when it is something else, or nested too deeply to be recorded.

    Refuses NaN, Infinity and 1e999, which Python accepts but other programs cannot read.
    """
    try:
        decoded = json.loads(arguments, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) and not too_deep(decoded) else None


def finite(text: str) -> float:
    """Parse a number of JSON. Raises ValueError for NaN, Infinity and 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number
