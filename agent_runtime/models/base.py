"""The interface of models."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agent_runtime.models.routed_experts import AnswerExperts
from rollout_api.model import Sampling
from rollout_api.records import Message, PolicySpan, Usage

RATE_LIMITED = "RateLimited"
"""Reason of a ModelError, and the beginning of `CallHealth.failing`, while the server limits the rate of calls."""

PROCESS_STOPPED = "ProcessStopped"
"""Reason of a ModelError: a client gave its call up because the process between it and the model stood still."""
STORAGE_SILENT = "StorageSilent"
"""The same, because storage for the record of the call did not answer."""

HELD_SHARE = 0.9
"""If an abandoned call was on hold for at least this share of its time, the lack of a server is the cause."""
NO_PLACE = "a call waited for a policy update or for free servers until the agent gave it up after {:.0f} s"


@dataclass(slots=True)
class CallHealth:
    """State of a call, which the model updates: time lost at a failing server does not count for the agent."""

    lost_seconds: float = 0.0
    """Time of failed attempts and the pauses after them, before the answered attempt."""
    failing: str | None = None
    """Why the latest attempt failed, while another one is pending or running; None while nothing fails. Set by `note`.
    """
    held_seconds: float = 0.0
    """Time on hold: waiting for the end of a policy update, or for a free place at a server."""
    on_hold: Callable[[bool], None] = lambda held: None
    """Called when time on hold begins and ends, so that deadlines can be suspended."""
    on_failing: Callable[[str | None], None] = lambda why: None
    """Called after each failed attempt, and with None when an answer begins after one. A user sees within seconds what the
    call waits for."""
    on_sign: Callable[[bool], None] = lambda answered: None
    """Called when an attempt ends or its answer begins: True for (part of) an answer, False for a failure."""
    on_prompt: Callable[[int], None] = lambda count: None
    """Called with the number of the prompt's tokens, if it is known before the answer."""
    on_tokens: Callable[[int], None] = lambda count: None
    """Called when tokens of a streamed answer arrive, also if their text is not streamed."""

    def note(self, why: str | None) -> None:
        """Record that the latest attempt failed for that reason, or (None) received something."""
        self.on_sign(why is None)
        if why is not None or self.failing is not None:
            self.failing = why
            self.on_failing(why)

    def failure(self, seconds: float) -> "ModelError | None":
        """Return why a call that its client gave up after this time had no answer; None if the model was only slow."""
        if self.failing is not None:
            return ModelError("Unreachable", self.failing)
        return ModelError("Timeout", NO_PLACE.format(seconds)) if self.held_seconds > HELD_SHARE * seconds else None


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """Token ids of a conversation so far, as the inference server reported them."""

    messages: int
    """Number of first messages of the request, the last answer included, that these ids represent."""
    ids: Sequence[int]
    experts: int = 0
    """Number of first ids whose routed experts need not be reported again."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call. `messages` and `tools` are in OpenAI's chat format."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Sampling
    seed: int
    session: str
    """Equal for all calls of one rollout, so that they go to the server that has its prefix cached."""
    task: str
    member: int
    turn: int
    max_tokens: int | None = None
    """Lower than `sampling.max_tokens` if less budget is left."""
    prefix: TokenPrefix | None = None
    """The previous turn's ids, if the messages extend it. A server that accepts token ids continues from them."""
    on_text: Callable[[str], None] | None = None
    """Called with each piece of plain text as it arrives, for streaming clients. Text that is, or may become, part of a
    tool call is not passed.
    """
    on_reasoning: Callable[[str], None] | None = None
    """Called with each piece of reasoning as it arrives, if the server streams it."""
    group: str = ""
    """Equal for all calls that share the beginning of their prompt. They go to the same server if it has a free place.
    """
    health: CallHealth = field(default_factory=CallHealth)
    call_id: str | None = None
    """Equal if a later process repeats the call, and unique otherwise. None if that is not known."""

    @property
    def answer_limit(self) -> int | None:
        """Most tokens of the answer; None without a limit."""
        limits = (self.sampling.max_tokens, self.max_tokens)
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it; `arguments` may be malformed JSON. An agent may pass them as a dict."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        for part, value in (("id", self.id), ("name", self.name)):
            if not isinstance(value, str):
                raise TypeError(f"ToolCall: {part} is {type(value).__name__}, expected text")
        if isinstance(self.arguments, Mapping):
            object.__setattr__(self, "arguments", json.dumps(dict(self.arguments)))
        elif not isinstance(self.arguments, str):
            raise TypeError(
                f"ToolCall {self.name}: arguments are {type(self.arguments).__name__}, expected a dict or its JSON text"
            )


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What the server returned, unchanged."""

    message: Message
    """The assistant message: role, content, tool_calls, reasoning_content."""
    finish_reason: str
    """stop | length | tool_calls | content_filter, or another value of the server."""
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    policy_spans: list[PolicySpan] = field(default_factory=list)
    """Policy version of each completion token; empty if the server does not report it."""
    stop_sequence: str | None = None
    """The stop string that ended the answer, if the server reports it or the ids show it."""
    routed_experts: AnswerExperts | None = None
    """The experts that processed the tokens of prompt and completion, if they are recorded."""

    @property
    def text(self) -> str:
        """Return the text of the answer, or an empty string."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Return the tool calls of the answer in order. Ids, names and arguments that are not text become text."""
        return [
            ToolCall(
                str(call.get("id") or f"call-{position}"),
                str(function.get("name") or ""),
                given if isinstance(given := function.get("arguments") or "", str) else json.dumps(given),
            )
            for position, call in enumerate(self.message.get("tool_calls") or [])
            if isinstance(function := call.get("function"), dict)
        ]


class ModelError(Exception):
    """The model is unavailable after all retries, for a reason that the policy did not cause. `reason` is one CamelCase
    word.
    """

    answers_others = False
    """The model answered another request right afterwards, so the request itself may be the cause."""
    refuses_others = False
    """After a refusal: the model refused another request too, so the request is not the cause."""
    after_tokens = False
    """The policy had begun its answer: tokens had arrived, or a whole answer that cannot be read, or a short answer to the
    same request arrived in time.
    """
    request: ModelRequest | None = None
    """The request at which the model failed, where it is known."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


FAILED = "error"
"""Finish reason of an answer in which the server failed. Gateways to other servers also put an error next to it."""


def end_of(choice: Mapping[str, Any]) -> str | None:
    """Return why a choice ended, as an OpenAI-compatible server says it; None if it does not."""
    if choice.get("error"):
        return FAILED
    given = choice.get("finish_reason")
    if isinstance(given, Mapping):  # SGLang's own form
        given = given.get("type")
    return str(given) if given else None


_BROKEN_OFF: Final = re.compile("abort|cancel|error|insufficient|overload|timeout|unavailable", re.IGNORECASE)


def is_given_up(finish_reason: str) -> bool:
    """Whether the server broke an answer off: `abort`, `error`, `insufficient_system_resource`, `network_error`. Any other
    reason is the policy's choice, or a limit.
    """
    return _BROKEN_OFF.search(finish_reason) is not None


class AnswerAborted(ModelError):
    """The server aborted an answer."""

    def __init__(self, source: str, finish_reason: str | None) -> None:
        super().__init__("Interrupted", f"{source} aborted an answer (finish reason {finish_reason})")


REQUESTS_OWN_FAULTS: Final = frozenset({"BadRequest", "NoToolParser", "TextModel"})
"""Reasons of a ModelError that depend on the content of the request, which the policy may have written."""


class ModelConfigError(ModelError):
    """An error that no retry and no other attempt can solve: a wrong key, an unknown model, a server with another API."""


class RequestRefused(ModelError):
    """The server refuses the request because of a field or a value, which the sender must change."""


class ConversationRefused(Exception):
    """The conversation, which the policy wrote, is refused."""

    refuses_others = False
    """The model refused another request right afterwards too, so the conversation is not the cause."""


class ContextExceeded(ConversationRefused):
    """The prompt exceeds the model's context."""


class ContentFiltered(ConversationRefused):
    """The server's content filter refuses the conversation."""


TOKEN_CAPTURES: Final = ("TextOnly", "Chat", "Tokens")
"""Ways to record token ids. A server that supports one also supports those before it."""


class Model(Protocol):
    """A source of answers."""

    name: str
    token_capture: str
    """How token ids are recorded, one of TOKEN_CAPTURES."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return one answer. Raises ModelError, ContextExceeded, ContentFiltered; cancelling it closes the connection."""

    async def check(self) -> None:
        """Check before the first rollout that the model is reachable and served. Raises ModelError."""

    async def close(self) -> None:
        """Close connections."""
