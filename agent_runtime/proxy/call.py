"""One model call that is under way, and which request is another one's retry (docs/session-proxy.md).

Several clients may wait for a call, when one is the other's retry. It is cancelled when the last of them has left. Equal
requests side by side are samples of their own, so a body alone never makes one a retry. Nor does a retry join an original
whose connection still lives, unless by its key.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import BadRequest
from agent_runtime.proxy.http import whole_number

RETRY_COUNT: Final = "x-stainless-retry-count"
IDEMPOTENCY_KEY: Final = "idempotency-key"

_LONGEST_KEY: Final = 255  # as in Stripe's API, whose header this is
MOST_KEPT: Final = 64
"""Answers that are kept for a retry; SDKs retry twice, and an agent has a handful of calls under way."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a request from others."""

    digest: str
    """SHA-256 of API and body."""
    key: str | None = None
    is_retry: bool = False

    @classmethod
    def of(cls, api: str, headers: Mapping[str, str], body: bytes) -> "Identity":
        """`headers` have names in lower case. Raises BadRequest."""
        key = headers.get(IDEMPOTENCY_KEY) or None
        if key is not None and len(key) > _LONGEST_KEY:
            raise BadRequest(f"Idempotency-Key: at most {_LONGEST_KEY} characters, got {len(key)}")
        digest = hashlib.sha256(api.encode() + b"\n" + body).hexdigest()
        return cls(digest, key, is_retry=bool(whole_number(headers.get(RETRY_COUNT, "0"))))


class Answers(Generic[T]):
    """The calls of a session that a retry may ask for again."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, tuple[Identity, T]] = OrderedDict()
        self._undelivered: OrderedDict[int, tuple[Identity, T]] = OrderedDict()
        self._number = 0

    def find(self, identity: Identity) -> T | None:
        """The call whose answer this request gets; None when it is one of its own. Raises BadRequest."""
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
    """What is known of a call before it is answered."""

    turn: int
    id: str
    created: int
    """Unix seconds."""
    identity: Identity


class Call:
    """`enter` a client, read its `pieces` and its `answer`, and let it `leave`."""

    def __init__(self, ticket: Ticket, on_left: Callable[["Call", bool | None], None]) -> None:
        self.ticket = ticket
        self.answered = False
        """The model's answer is there, recorded or about to be: too late to cancel it."""
        self._on_left = on_left
        self._pieces: list[str] = []
        self._changed: asyncio.Future[None] | None = None
        self._task: asyncio.Future[ModelReply] | None = None
        self._clients = 0
        self._delivered: bool | None = False

    @property
    def succeeded(self) -> bool:
        return self._work.done() and not self._work.cancelled() and self._work.exception() is None

    def run(self, work: Coroutine[Any, Any, ModelReply]) -> None:
        self._task = asyncio.ensure_future(work)
        self._task.add_done_callback(self._done)

    def replay(self, reply: ModelReply) -> None:
        self.answered = True
        self._task = asyncio.get_running_loop().create_future()
        self._task.set_result(reply)

    def add_text(self, piece: str) -> None:
        self._pieces.append(piece)
        self._wake()

    def enter(self) -> None:
        self._clients += 1

    def leave(self, delivered: bool | None) -> None:
        """A client has its whole answer, or went away without it; None: that remains to be told."""
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

    async def started(self) -> None:
        """Until there is text, or the answer. Raises what the call failed with."""
        while not self._pieces and not self._work.done():
            await self._change()
        if self._work.done():
            self._work.result()

    async def pieces(self) -> AsyncIterator[str]:
        """The text, in pieces as large as the client's own slowness makes them; what arrives meanwhile waits here, and is
        never more than one answer. Ends with the call, also with one that failed."""
        position = 0
        while True:
            if position < len(self._pieces):
                text = "".join(self._pieces[position:])
                position = len(self._pieces)
                yield text
            elif self._work.done():
                return
            else:
                await self._change()

    async def answer(self) -> ModelReply:
        """The recorded answer. Raises what the call failed with."""
        return await asyncio.shield(self._work)

    async def ended(self) -> None:
        await asyncio.wait([self._work])

    @property
    def _work(self) -> asyncio.Future[ModelReply]:
        assert self._task is not None  # `run` or `replay` comes first
        return self._task

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _wake(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            changed.set_result(None)

    def _done(self, task: asyncio.Future[ModelReply]) -> None:
        if not task.cancelled():
            task.exception()  # a client that left does not ask for it
        self._wake()
