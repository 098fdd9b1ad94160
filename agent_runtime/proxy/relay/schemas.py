"""The relay's messages: JSON objects, one in each WebSocket text frame. Pure.

worker → proxy   worker_hello {worker_id, model, token_capture, capacity, prompts, sessions}
    proxy → worker   worker_hello_ack {worker_id}
    proxy → worker   completion_request {request_id, session_id, messages or prompt, tools, temperature, …, stream, …}
    worker → proxy   completion_chunk {request_id, text, reasoning, tokens, prompt_tokens}…  where `stream` is true
    worker → proxy   completion_response {request_id, token_ids, log_probs, …, error}
    proxy → worker   completion_cancel {request_id}                  no response is wanted any more
    both             ping, pong

They are compatible with verl-recipe PR #83 (its inference relay and worker client), whose workers can connect too. Our
additions are `completion_chunk`, `completion_cancel`, all fields of hello except the id, and the fields of requests and
responses that are marked below. Unknown fields are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from agent_runtime.models.base import (
    AnswerAborted,
    ContentFiltered,
    ContextExceeded,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
    TokenPrefix,
    is_given_up,
)
from rollout_api.base import ApiModel, problems_in
from rollout_api.model import Sampling
from rollout_api.records import Message, PolicySpan, Usage

PATH: Final = "/ws/worker"

FRAME_BYTES: Final = 100 << 20
"""Messages are shorter, as in PR #83: aiohttp ends the connection of one with this many bytes."""

BROKEN: Final = 4000
"""Close code: the received data is not a message of the relay, or there was no hello. The codes 4000 to 4002 are PR
#83's.
"""
REFUSED: Final = 4001
"""Close code: the worker cannot serve here, and reconnecting does not help."""
REPLACED: Final = 4002
"""Close code: a worker of the same name has connected."""

JsonObject = dict[str, Any]
Prompt = str | Sequence[int]
"""Text or token ids to continue without a chat template."""

_PROMPT: Final[TypeAdapter[str | list[int] | None]] = TypeAdapter(str | list[int] | None)


class FormError(Exception):
    """A message lacks a field, or has one of the wrong type. The error names both."""


class Hello(ApiModel, extra="ignore"):
    """A worker's description of itself. A worker of PR #83 only sends its name."""

    worker_id: str
    model: str | None = None
    token_capture: str = "TextOnly"
    capacity: int | None = None
    """Concurrent calls that it accepts; None: unlimited."""
    prompts: bool = False
    """Whether the worker accepts bare prompts. Workers without support would ignore this field of a request."""
    sessions: str | None = None
    """Only this worker answers sessions with this name prefix; None: it answers all others."""


def hello(message: Mapping[str, Any]) -> Hello:
    try:
        found = Hello.model_validate(message)
    except ValidationError as error:
        raise FormError(f"worker_hello: {problems_in(error)[0]}") from None
    if not found.worker_id:
        raise FormError("worker_hello: worker_id: it is empty; expected a name")
    return found


def request_message(id: str, request: ModelRequest, model: str, prompt: Prompt | None = None) -> JsonObject:
    """Return a `completion_request`. With a bare prompt the messages of the request are ignored.

    A field without a value is left out: a worker of PR #83 uses its own default for a missing field, but not for a
    null.
    """
    sampling, prefix = request.sampling, request.prefix
    limits = [limit for limit in (sampling.max_tokens, request.max_tokens) if limit is not None]
    fields = {
        "type": "completion_request",
        "request_id": id,
        "session_id": request.session,
        "model": model,
        "messages": list(request.messages) if prompt is None else [],
        "tools": list(request.tools) or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": min(limits) if limits else None,
        "stop": sampling.stop or None,
        "repetition_penalty": sampling.extra.get("repetition_penalty"),
        "stream": request.on_text is not None,
        # Ours.
        "prompt": prompt if prompt is None or isinstance(prompt, str) else list(prompt),
        "extra": sampling.extra,
        "seed": request.seed,
        "task": request.task,
        "member": request.member,
        "turn": request.turn,
        "prefix": None if prefix is None else {"messages": prefix.messages, "ids": list(prefix.ids)},
    }
    return {name: value for name, value in fields.items() if value is not None}


def request_of(message: Mapping[str, Any]) -> ModelRequest:
    """Return the call in a `completion_request` of our proxy, without `on_text`. Raises FormError."""
    try:
        prefix = message.get("prefix")
        return ModelRequest(
            messages=message["messages"],
            tools=message.get("tools") or [],
            sampling=Sampling(
                temperature=message.get("temperature"),
                top_p=message.get("top_p"),
                max_tokens=message.get("max_tokens"),
                stop=message.get("stop") or [],
                extra=message["extra"],
            ),
            seed=message["seed"],
            session=message["session_id"],
            task=message["task"],
            member=message["member"],
            turn=message["turn"],
            prefix=None if prefix is None else TokenPrefix(prefix["messages"], prefix["ids"]),
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise FormError(f"completion_request: {type(error).__name__}: {error}") from None


def prompt_of(message: Mapping[str, Any]) -> Prompt | None:
    """Return the bare prompt of a `completion_request`; None if it has messages. Raises FormError."""
    try:
        return _PROMPT.validate_python(message.get("prompt"), strict=True)
    except ValidationError:
        raise FormError("completion_request: prompt: expected a text, or a list of token ids") from None


def reply_message(id: str, reply: ModelReply) -> JsonObject:
    return {
        "type": "completion_response",
        "request_id": id,
        "prompt_token_ids": reply.prompt_token_ids,
        "token_ids": reply.completion_token_ids,
        "log_probs": reply.logprobs,
        "finish_reason": reply.finish_reason,
        "error": None,
        # Our addition. PR #83 sends the message's parts instead (`completion_text`, `content_text`, `tool_calls`),
        # without reasoning.
        "message": reply.message,
        "model": reply.model,
        "usage": reply.usage.model_dump(by_alias=False),
        "policy_spans": [span.model_dump(by_alias=False) for span in reply.policy_spans],
        "stop_sequence": reply.stop_sequence,
    }


_ERRORS: Final[Mapping[str, type[ModelError | ContextExceeded | ContentFiltered]]] = {
    "context_length_exceeded": ContextExceeded,
    "content_filter": ContentFiltered,
    "config": ModelConfigError,
    "invalid_request": RequestRefused,
    "internal": ModelError,
}


def error_message(id: str, error: ModelError | ContextExceeded | ContentFiltered) -> JsonObject:
    kind = next(word for word, form in _ERRORS.items() if isinstance(error, form))
    told = {"type": "completion_response", "request_id": id, "error": str(error), "error_type": kind}
    return told | ({"error": error.message, "error_reason": error.reason} if isinstance(error, ModelError) else {})


class _Answer(ApiModel, extra="ignore"):
    """A `completion_response` without an error."""

    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    log_probs: list[float] | None = None
    completion_text: str | None = None
    content_text: str | None = None
    tool_calls: list[JsonObject] | None = None
    finish_reason: str | None = None
    weight_version: str | int | None = None
    """As reported by later workers of PR #83, instead of our spans."""
    message: Message | None = None
    model: str | None = None
    usage: Usage | None = None
    policy_spans: list[PolicySpan] | None = None
    stop_sequence: str | None = None

    def assistant(self) -> Message:
        """Return the message, also from a worker that only sends its parts."""
        if self.message is not None:
            return self.message
        text = self.completion_text if self.content_text is None else self.content_text
        return {"role": "assistant", "content": text, **({"tool_calls": self.tool_calls} if self.tool_calls else {})}

    def spans(self) -> list[PolicySpan]:
        if self.policy_spans is not None or self.weight_version is None:
            return self.policy_spans or []
        return [PolicySpan(tokens=len(self.token_ids or []), version=str(self.weight_version))]


def reply_of(message: Mapping[str, Any]) -> ModelReply:
    """Return the answer in a `completion_response`. Raises the failure that it reports instead, or FormError."""
    if message.get("error_type") or message.get("error"):
        raise _failure(message)
    try:
        told = _Answer.model_validate(message)
    except ValidationError as error:
        raise FormError(f"completion_response: {problems_in(error)[0]}") from None
    if told.finish_reason and is_given_up(told.finish_reason):
        raise AnswerAborted("the worker's server", told.finish_reason)
    answer = told.assistant()
    if answer.get("role") != "assistant":
        raise FormError(f"completion_response: message: expected an assistant message, got {answer!r:.200}")
    return ModelReply(
        message=answer,
        finish_reason=told.finish_reason or "stop",
        model=told.model or "",
        usage=told.usage or Usage(completion_tokens=len(told.token_ids or [])),
        prompt_token_ids=told.prompt_token_ids,
        completion_token_ids=told.token_ids,
        logprobs=told.log_probs,
        policy_spans=told.spans(),
        stop_sequence=told.stop_sequence,
    )


def _failure(message: Mapping[str, Any]) -> ModelError | ContextExceeded | ContentFiltered:
    kind = message.get("error_type")
    words = str(message.get("error") or "").strip() or f"the worker reported {kind!r} without a message"
    form = _ERRORS.get(str(kind), ModelError)
    if issubclass(form, ModelError):
        return form(str(message.get("error_reason") or "WorkerFailed"), words)
    return form(words)
