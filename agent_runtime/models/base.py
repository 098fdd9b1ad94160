"""What an agent asks of a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_api.model import Sampling
from rollout_api.records import Message, PolicySpan, Usage


@dataclass(slots=True)
class CallHealth:
    """How a call fares, written by the model while it works: an agent's time is not used up by a server that fails."""

    lost_seconds: float = 0.0
    """Spent on failed tries and the pauses after them, before the try that was answered."""
    failing: str | None = None
    """Why the latest try failed, while another one is waited for or under way; None while nothing fails. Set by `note`."""
    held_seconds: float = 0.0
    """Spent where nobody could answer: behind the shut gate of a policy update, or waiting for a place at a server."""
    on_hold: Callable[[bool], None] = lambda held: None
    """Told when such a time begins and when it ends, so that deadlines can stand still meanwhile."""
    on_failing: Callable[[str | None], None] = lambda why: None
    """Called when `failing` changes, so that a person sees within seconds what the call waits for."""
    on_sign: Callable[[bool], None] = lambda answered: None
    """Called when a try ends: True with an answer or the beginning of one, False with a failure."""

    def note(self, why: str | None) -> None:
        """The latest try failed for that reason, or (None) brought something."""
        self.on_sign(why is None)
        if why != self.failing:
            self.failing = why
            self.on_failing(why)


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """What the engine has seen of a conversation so far, as it saw it."""

    messages: int
    """Messages at the head of the request, the last answer included, that these ids stand for."""
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call. `messages` and `tools` are in OpenAI's chat form."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Sampling
    seed: int
    session: str
    """Same for all calls of one rollout; servers keep its prefix in one cache by it."""
    task: str
    member: int
    turn: int
    max_tokens: int | None = None
    """Tighter than `sampling.max_tokens` where the budget left is smaller."""
    prefix: TokenPrefix | None = None
    """The previous turn's ids, where the messages extend it; a server that takes token ids goes on from them."""
    on_text: Callable[[str], None] | None = None
    """Called with each piece of plain text as it arrives, for clients that stream. Text that belongs to a tool call, or
    may yet turn out to, is held back."""
    group: str = ""
    """Same for all calls that share the beginning of their prompt; they go to the same server where it has room."""
    health: CallHealth = field(default_factory=CallHealth)

    @property
    def answer_limit(self) -> int | None:
        """Most tokens of the answer; None where nothing limits it."""
        limits = (self.sampling.max_tokens, self.max_tokens)
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it; `arguments` may be malformed JSON. An agent may give them as a dict."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
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
    """stop | length | tool_calls | content_filter, or the server's own."""
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    policy_spans: list[PolicySpan] = field(default_factory=list)
    """Which policy version made which completion token; empty where the server does not say."""
    stop_sequence: str | None = None
    """The stop string that ended the answer, where the server says so or the ids show it."""

    @property
    def text(self) -> str:
        """The text of the answer; empty when there is none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the answer, in order. Arguments that are not text become JSON text."""
        return [
            ToolCall(
                call.get("id") or f"call-{position}",
                function.get("name") or "",
                given if isinstance(given := function.get("arguments") or "", str) else json.dumps(given),
            )
            for position, call in enumerate(self.message.get("tool_calls") or [])
            if isinstance(function := call.get("function"), dict)
        ]


class ModelError(Exception):
    """The model could not be had: not the policy's doing. Retries are used up. `reason` is one CamelCase word."""

    answers_others = False
    """The model answered another request right afterwards, so this one may be what it failed at."""
    after_tokens = False
    """The policy had begun its answer: tokens of it had arrived."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class ModelConfigError(ModelError):
    """No retry and no other attempt will help: a wrong key, an unknown model, a server that speaks something else."""


class RequestRefused(ModelError):
    """The server will not answer the request as it is: a field that it does not take, or a value. Whoever made the request
    has to change it; the server itself is well."""


class ContextExceeded(Exception):
    """The prompt does not fit into the model's context: the policy's doing."""


class ContentFiltered(Exception):
    """The server refused to answer this conversation: the policy's doing."""


class Model(Protocol):
    """Something that answers."""

    name: str
    token_capture: str
    """Tokens | Chat | TextOnly: how token ids are recorded."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """One answer. Raises ModelError, ContextExceeded, ContentFiltered; cancelling it closes the connection."""

    async def check(self) -> None:
        """Find out before the first rollout whether the model can be reached and is served. Raises ModelError."""

    async def close(self) -> None:
        """Close connections."""
