"""One model call that is under way: its text as it arrives, and its answer once that is recorded.

Several clients may wait for it, when one is the other's retry. It is cancelled when the last of them has left.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.coalescing import Identity


@dataclass(frozen=True, slots=True)
class Ticket:
    """What is known of a call before it is answered."""

    turn: int
    id: str
    """`ChatAnswer.id`."""
    created: int
    """Unix seconds."""
    identity: Identity
    """By which a retry is known."""


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
        """Start it. The work's result is a recorded answer."""
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
