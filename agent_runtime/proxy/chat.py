"""The internal format of a call, for all client APIs, and the interface of an API's translation.

A call goes through a translation in this order::

    request = protocol.parse(decoded(body), earlier)     # BadRequest → protocol.error(...)
    encoder = protocol.encoder(request, id, created)      # when request.stream
        encoder.start(), encoder.text(piece)..., encoder.end(answer), encoder.error(kind, message)
    protocol.answer(request, answer)                      # otherwise

**A client's next request has its copy of the answer**, which may be incomplete, depending on the API. `parse` returns
the client's messages. `conversation.py` finds copies of answers in them and replaces them by the originals, so that the
conversation extends the tokens that the inference server saw.

**Completions have no chat template.** Their one message has the role `prompt`: `{"role": "prompt", "content": text}` or
`{"role": "prompt", "token_ids": [...]}`. No template has this role, so such a call never counts as the start of a
chat, and is recorded unchanged. A model that can continue a bare prompt is a `PromptModel`; for any other the call is
refused (ErrorKind.BAD_REQUEST).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol, runtime_checkable

from agent_runtime.models.answers import finite, whole
from agent_runtime.models.base import ModelReply, ModelRequest
from rollout_api.model import Sampling
from rollout_api.nesting import DEEPEST, estimated_values, too_deep
from rollout_api.records import Message

PROMPT_ROLE = "prompt"

MOST_VALUES = 1 << 20
"""Most values of a request's body, estimated by their separators. A context of a million tokens has fewer. This many
take 100 MB of memory.
"""

JsonObject = dict[str, Any]

Earlier = Callable[[str], Sequence[Message] | None]
"""The stored conversation, answer included, whose answer has this id (`ChatAnswer.id`); None if the id is unknown."""


class ErrorKind(Enum):
    """Kinds of errors of a call. The value is the HTTP status, and a word that distinguishes kinds with the same
    status.
    """

    BAD_REQUEST = (400, "invalid_request")
    CONTEXT_EXCEEDED = (400, "context_length_exceeded")
    PREVIOUS_NOT_FOUND = (400, "previous_response_not_found")
    CONTENT_FILTERED = (400, "content_filter")
    UNAUTHORIZED = (401, "invalid_api_key")
    OVER_BUDGET = (403, "budget_exceeded")
    MODEL_NOT_FOUND = (404, "model_not_found")
    NOT_FOUND = (404, "not_found")
    SESSION_ENDED = (409, "session_ended")
    SESSION_EXISTS = (409, "session_exists")
    TOO_LARGE = (413, "request_too_large")
    RATE_LIMITED = (429, "rate_limit_exceeded")
    INTERNAL = (500, "internal_error")
    BAD_GATEWAY = (502, "model_failed")
    UNAVAILABLE = (503, "model_unavailable")
    TIMEOUT = (504, "model_timeout")

    @property
    def status(self) -> int:
        return self.value[0]

    @property
    def code(self) -> str:
        """Return a machine-readable word; OpenAI's own if it has one."""
        return self.value[1]

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of the error. The openai and anthropic packages retry a 409 by default."""
        if self in (ErrorKind.RATE_LIMITED, ErrorKind.BAD_GATEWAY, ErrorKind.UNAVAILABLE, ErrorKind.TIMEOUT):
            return {"Retry-After": "1"}  # the model has already retried
        return {"x-should-retry": "false"} if self.status in (403, 409) else {}


class Refused(Exception):
    """An error of a call, before or after it was sent to the model. `param` names a field of the request."""

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param


class BadRequest(Refused):
    """The client's request is invalid or not supported."""

    def __init__(self, message: str, param: str | None = None, kind: ErrorKind = ErrorKind.BAD_REQUEST) -> None:
        super().__init__(kind, message, param)


class NoteKind(StrEnum):
    """Parts of a request that can be dropped."""

    FIELD = "field"
    TOOL = "tool"
    TOOL_CHOICE = "tool_choice"
    CONTENT = "content"
    COUNT = "count"
    """A count of tokens that is an estimate."""


@dataclass(frozen=True, slots=True)
class Note:
    """A part of a request that the proxy drops or changes, because the model cannot be given it."""

    kind: NoteKind
    text: str
    """The path of the part, and the reason."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A call in OpenAI's chat format."""

    model: str
    messages: list[Message]
    tools: list[JsonObject] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    """The client's own seed, if given."""
    stream: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data that the protocol needs to format the answer."""
    notes: Sequence[Note] = ()
    """The dropped parts."""
    unknown: frozenset[str] = frozenset()
    """Fields of `sampling.extra` that the proxy does not know, and the inference server may not know either."""


def prompt_of(request: ChatRequest) -> str | Sequence[int] | None:
    """Return the bare prompt of a completion, as text or token ids; None for a chat."""
    first: Message = request.messages[0] if request.messages else {}
    if first.get("role") != PROMPT_ROLE:
        return None
    prompt: str | Sequence[int] = first.get("token_ids") or first["content"]
    return prompt


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer to a ChatRequest."""

    reply: ModelReply
    id: str
    """Letters, digits and `-`; unique in its session. The protocol adds its own prefix."""
    created: int
    """Unix seconds."""


@runtime_checkable
class PromptModel(Protocol):
    """A `Model` that can also complete a bare prompt, without a chat template."""

    async def complete_prompt(self, prompt: str | Sequence[int], request: ModelRequest) -> ModelReply:
        """Return one completion of text or token ids; the messages of the request are ignored. Raises as `complete`."""


@runtime_checkable
class TokenCounter(Protocol):
    """A `Model` that can count the tokens of a prompt."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return the tokens of the rendered messages and tools; None if the server cannot count them. Raises as
        `complete`.
        """


@runtime_checkable
class SelectiveModel(Protocol):
    """A `Model` that knows which further fields of a request its server ignores."""

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> Sequence[str]:
        """Return the names of these fields (`Sampling.extra`). `prompt`: the request is a bare prompt."""


class Encoder(Protocol):
    """Formats one streamed answer as bytes of a `text/event-stream`. First `start` is called, then `reasoning`, `text`
    and `ping` in any order, and then `end` or `error`.
    """

    def start(self, prompt_tokens: int) -> bytes:
        """Return what is sent before the first token. `prompt_tokens` is 0 if the count is unknown."""

    def reasoning(self, piece: str) -> bytes:
        """Return a piece of reasoning (`ModelRequest.on_reasoning`)."""

    def text(self, piece: str) -> bytes:
        """Return a piece of plain text (`ModelRequest.on_text`)."""

    def ping(self) -> bytes:
        """Return bytes that keep the connection alive and that clients ignore."""

    def end(self, answer: ChatAnswer) -> bytes:
        """Return the rest of the answer (reasoning, tool calls, the end of the text) and the end of the stream."""

    def error(self, kind: ErrorKind, message: str) -> bytes:
        """Return the failure that ends the stream instead of `end`."""


class Translation(Protocol):
    """Translation of one public API."""

    name: str
    """Name for metrics and messages."""
    path: str
    """Path under the base URL after `/v1`: `/chat/completions`."""

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        """Parse a request. Raises BadRequest."""

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        """Return the body of an answer that is not streamed."""

    def encoder(self, request: ChatRequest, id: str, created: int) -> Encoder:
        """Return the encoder of a streamed answer; `id` and `created` are those of the later ChatAnswer."""

    def error(self, kind: ErrorKind, message: str, param: str | None = None) -> JsonObject:
        """Return the body of an error; the status is `kind.status`."""


def decoded(body: bytes) -> JsonObject:
    """Return the JSON object in the body of a request. Unpaired surrogates become `?`, because they can be neither recorded
    nor sent. Raises BadRequest.
    """
    if estimated_values(body) > MOST_VALUES:
        raise BadRequest(f"the body has more than {MOST_VALUES} values; send a shorter conversation")
    try:
        payload = json.loads(body, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON ({error}); send a JSON object") from None
    if not isinstance(payload, dict):
        raise BadRequest(f"the body is a JSON {type(payload).__name__}, expected an object")
    if too_deep(payload):
        raise BadRequest(
            f"the body is nested more than {DEEPEST} levels deep and cannot be recorded; reduce the nesting"
        )
    has_surrogates = b"\\ud" in body or b"\\uD" in body or not _is_utf8(body)
    cleaned: JsonObject = whole(payload) if has_surrogates else payload
    return cleaned


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return json.detect_encoding(body) == "utf-8"


PING = b": ping\n\n"
"""A comment of an event stream, which clients ignore."""


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class StreamedText:
    """Pieces that were sent before the whole answer was known, and the rest of it.

    The server parses the complete answer, and may then trim the text before a tool call. Text that was already sent
    stays.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        self._pieces.append(piece)

    def missing(self, text: str) -> str:
        """Return the unsent rest of the whole text; empty if the text does not begin with the pieces."""
        return text.removeprefix(self.whole) if text.startswith(self.whole) else ""

    def rest(self, text: str) -> str:
        """Return the unsent rest of the whole text, which counts as sent from now on."""
        rest = self.missing(text)
        if rest:
            self._pieces.append(rest)
        return rest

    @property
    def whole(self) -> str:
        return "".join(self._pieces)
