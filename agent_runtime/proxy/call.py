"""A running model call, and detection of its retries (docs/session-proxy.md). A retry gets the answer of the original
call, so several clients may wait for one call. It is cancelled when the last of them has disconnected. Equal concurrent
requests are separate samples, so an equal body is not sufficient for a retry. While the original's connection is open,
a request only counts as its retry if it has the same idempotency key.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Generic, TypeVar

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import BadRequest
from agent_runtime.proxy.http import whole_number
from agent_runtime.proxy.own_delay import OwnDelay
from agent_runtime.shared_tasks import started

RETRY_COUNT: Final = "x-stainless-retry-count"
IDEMPOTENCY_KEY: Final = "idempotency-key"

_LONGEST_KEY: Final = 255  # the same limit as in Stripe's API, which introduced this header
MOST_KEPT: Final = 64
"""Number of answers that are kept for retries. SDKs retry twice, and agents have few concurrent calls."""

STALLED_SECONDS: Final = 10.0
"""If a client disconnects after such a pause in the tokens of an answer, the server is the cause."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """What distinguishes a request from others."""

    digest: str
    """SHA-256 of API and body."""
    key: str | None = None
    is_retry: bool = False

    @classmethod
    def of(cls, api: str, headers: Mapping[str, str], body: bytes) -> "Identity":
        """Return the identity of a request. `headers` have lower-case names. Raises BadRequest."""
        key = headers.get(IDEMPOTENCY_KEY) or None
        if key is not None and len(key) > _LONGEST_KEY:
            raise BadRequest(f"Idempotency-Key: at most {_LONGEST_KEY} characters, got {len(key)}")
        digest = hashlib.sha256(api.encode() + b"\n" + body).hexdigest()
        return cls(digest, key, is_retry=bool(whole_number(headers.get(RETRY_COUNT, "0"))))


class Answers(Generic[T]):
    """The calls of a session that a retry may request again."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, tuple[Identity, T]] = OrderedDict()
        self._undelivered: OrderedDict[int, tuple[Identity, T]] = OrderedDict()
        self._number = 0

    def find(self, identity: Identity) -> T | None:
        """Return the call whose answer this request gets; None if it is a new one. Raises BadRequest."""
        if identity.key is not None:
            if (known := self._by_key.get(identity.key)) is None:
                return None
            if known[0].digest != identity.digest:
                raise BadRequest("Idempotency-Key: it was used for another request; give each request its own")
            return known[1]
        if not identity.is_retry:
            return None
        equal = (number for number, (other, _) in self._undelivered.items() if other.digest == identity.digest)
        number = next(equal, None)
        return None if number is None else self._undelivered.pop(number)[1]

    def begun(self, identity: Identity, call: T) -> None:
        if identity.key is not None:
            self._by_key[identity.key] = identity, call
            if len(self._by_key) > MOST_KEPT:
                self._by_key.popitem(last=False)

    def failed(self, identity: Identity, call: T) -> None:
        if identity.key is not None and (known := self._by_key.get(identity.key)) and known[1] is call:
            del self._by_key[identity.key]
        self.forget(call)

    def undelivered(self, identity: Identity, call: T) -> None:
        self._number += 1
        self._undelivered[self._number] = identity, call
        if len(self._undelivered) > MOST_KEPT:
            self._undelivered.popitem(last=False)

    def forget(self, call: T) -> None:
        for number, (_, other) in list(self._undelivered.items()):
            if other is call:
                del self._undelivered[number]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Facts about a call before it is answered."""

    turn: int
    id: str
    created: int
    """Unix seconds."""
    identity: Identity


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer as it arrived."""

    text: str
    is_reasoning: bool = False


class Call:
    """`enter` a client, read its `pieces` and its `answer`, and let it `leave`."""

    def __init__(self, ticket: Ticket, on_left: Callable[["Call", bool | None], None], delay: OwnDelay) -> None:
        self.ticket, self.delay = ticket, delay
        self.answered = False
        """Whether the model's answer has arrived and is, or will be, recorded, so that the call cannot be cancelled."""
        self._on_left = on_left
        self.prompt_tokens = 0
        """Tokens of the prompt, 0 until they are known."""
        self._pieces: list[Piece] = []
        self._tokens = 0
        self._token_at = 0.0
        self._changed = asyncio.Event()
        self._task: asyncio.Future[ModelReply] | None = None
        self._clients = 0
        self._delivered: bool | None = False

    @property
    def succeeded(self) -> bool:
        return self._work.done() and not self._work.cancelled() and self._work.exception() is None

    @property
    def failed(self) -> bool:
        return self._work.done() and not self.succeeded

    @property
    def has_pieces(self) -> bool:
        """Whether a part of the answer has arrived."""
        return bool(self._pieces)

    @property
    def abandoned_tokens(self) -> int:
        """Return the number of tokens that arrived until the client disconnected, at least one for each piece of text; 0
        if there was no text yet, or if the server had stalled.
        """
        stalled = time.monotonic() - self._token_at > STALLED_SECONDS
        return 0 if stalled or not self._pieces else max(self._tokens, len(self._pieces))

    def run(self, work: Coroutine[Any, Any, ModelReply]) -> None:
        self._task = started(work)
        self._task.add_done_callback(lambda _: self._wake())

    def replay(self, reply: ModelReply, *, delivered: bool) -> None:
        """Set a recorded answer. One that a client has stays delivered, also if a repeated request is interrupted."""
        self.answered, self._delivered = True, delivered
        self._task = asyncio.get_running_loop().create_future()
        self._task.set_result(reply)

    def add_tokens(self, count: int) -> None:
        self._tokens += count
        self._token_at = time.monotonic()

    def add_prompt_tokens(self, count: int) -> None:
        self.prompt_tokens = count

    def add_text(self, piece: str) -> None:
        self._add(Piece(piece))

    def add_reasoning(self, piece: str) -> None:
        self._add(Piece(piece, is_reasoning=True))

    def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._token_at = time.monotonic()
        self._wake()

    def enter(self) -> None:
        self._clients += 1

    def leave(self, delivered: bool | None) -> None:
        """Remove a client that has its whole answer (True) or disconnected (False); None: not yet known."""
        self._clients -= 1
        if not self._delivered:
            self._delivered = delivered if delivered is not False else self._delivered
        if self._clients:
            return
        if not self.answered:
            self.cancel()
        self._on_left(self, self._delivered)

    def cancel(self) -> None:
        if self._task is not None and not self.answered:
            self._task.cancel()

    async def started(self, within_seconds: float | None = None) -> None:
        """Wait until there is a piece, or the answer, at most for this time if it is given. Raises the call's error."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                while not self._pieces and not self._work.done():
                    await self._changed.wait()
        if self._work.done():
            self._work.result()

    async def pieces(self, pause_seconds: float | None = None) -> AsyncIterator[Piece | None]:
        """Yield the reasoning and the text. What arrives while the client is slow is combined into larger pieces. Yields
        None after a pause of this length. Ends with the call, even if it failed.
        """
        position = 0
        while True:
            if position < len(self._pieces):
                arrived, position = self._pieces[position:], len(self._pieces)
                for is_reasoning, equal in groupby(arrived, key=lambda piece: piece.is_reasoning):
                    yield Piece("".join(piece.text for piece in equal), is_reasoning)
            elif self._work.done():
                return
            else:
                try:
                    async with asyncio.timeout(pause_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    yield None

    async def answer(self) -> ModelReply:
        """Return the recorded answer. Raises the call's error."""
        return await asyncio.shield(self._work)

    async def ended(self) -> None:
        await asyncio.wait([self._work])

    @property
    def _work(self) -> asyncio.Future[ModelReply]:
        assert self._task is not None  # `run` or `replay` is called first
        return self._task

    def _wake(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()
        self._changed.clear()
