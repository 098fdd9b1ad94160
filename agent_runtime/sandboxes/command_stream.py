"""One connection to an executor that carries all commands of this process (docs/executor.md, "Commands").

Who answers is in a sandbox, so frames are bounded, and whatever is no frame ends the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from agent_runtime.sandboxes.command_frames import HEAD, packed
from agent_runtime.sandboxes.executor_connection import KEPT_SECONDS, BrokenReply

# What the connection becomes, in the Upgrade header.
UPGRADE = "rollout-commands"
# The executor answers within 25 s that a command runs; half a minute more is a hung executor.
SILENCE_SECONDS = 55.0
# Head and tail of two streams, of 1 MiB at most each, and the rest.
MAX_ANSWER_BYTES = 4 * 1024 * 1024 + 64 * 1024


class CommandStream(asyncio.Protocol):
    """One such connection; any number of commands at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._input = bytearray()
        self._is_lost = False
        self._count = 0
        self._idle_since = 0.0
        # By number, in the order in which patience with them ends.
        self._asked: dict[int, tuple[asyncio.Future[bytearray], float]] = {}
        self._patience: asyncio.TimerHandle | None = None

    @property
    def is_usable(self) -> bool:
        """It can take another command: an idle one is kept as long as a connection of HTTP."""
        if self._is_lost or self._transport.is_closing():
            return False
        return bool(self._asked) or self._idle_since > time.monotonic() - KEPT_SECONDS

    async def ask(self, content: bytes) -> bytearray:
        """The answer to a command, the contents of both frames. Raises OSError, TimeoutError."""
        if self._is_lost:
            raise BrokenReply("the executor has closed the connection")
        self._count += 1
        answer: asyncio.Future[bytearray] = self._loop.create_future()
        until = self._loop.time() + SILENCE_SECONDS
        self._asked[self._count] = answer, until
        if self._patience is None:
            self._patience = self._loop.call_at(until, self._end_patience)
        self._transport.write(packed(self._count, content))
        return await answer

    def abort(self) -> None:
        """Cut it at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._idle_since = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._patience is not None:
            self._patience.cancel()
        self._fail(BrokenReply("the executor has closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._input += data
        while len(self._input) >= HEAD.size:
            size, number = HEAD.unpack_from(self._input)
            end = 4 + size
            if not HEAD.size < end <= MAX_ANSWER_BYTES or number not in self._asked:
                self._transport.abort()
                return
            if len(self._input) < end:
                return
            content = self._input[HEAD.size : end]
            del self._input[:end]
            answer, _ = self._asked.pop(number)
            if not answer.done():
                answer.set_result(content)
        if not self._asked:
            self._idle_since = time.monotonic()

    def _end_patience(self) -> None:
        self._patience = None
        oldest = next(iter(self._asked.values()), None)
        if oldest is None:
            return
        if oldest[1] > self._loop.time():
            self._patience = self._loop.call_at(oldest[1], self._end_patience)
            return
        self._fail(TimeoutError(f"silent for {SILENCE_SECONDS:g} s"))
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        for answer, _ in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked.clear()


class CommandStreams:
    """The one stream that is open, opened by `connect` when it is needed; it, and everything here, raises OSError and
    TimeoutError.
    """

    def __init__(self, connect: Callable[[], Awaitable[CommandStream]]) -> None:
        self._connect = connect
        self._stream: CommandStream | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, content: bytes) -> bytearray:
        """The answer to a command, the contents of both frames."""
        stream = self._stream
        if stream is None or not stream.is_usable:
            async with self._connecting:
                stream = self._stream
                if stream is None or not stream.is_usable:
                    self.close()
                    stream = self._stream = await self._connect()
        return await stream.ask(content)

    def close(self) -> None:
        """Cut it."""
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
