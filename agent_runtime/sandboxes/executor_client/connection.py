"""HTTP/1.1 to one server, the executor's (executor/http/server.py): kept connections, replies whole or as a stream.

Tool calls are small requests with small replies, for which a general client needs three times the processor time
(docs/performance.md). The server is in a sandbox and untrusted, so heads are limited, and anything but HTTP ends the
connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

# Much shorter than the 300 s after which the executor closes an idle connection, so that kept connections are usually
# open.
KEPT_SECONDS = 15.0
# Time limit of the executor's silence during an upload, in which it may walk whole trees on a busy machine. A dead
# executor is detected sooner.
STALL_SECONDS = 900.0
# The executor's limit of a request's head; replies have smaller ones.
MAX_HEAD_BYTES = 32 * 1024
# Limit of a chunk's size line, which may instead have an error of the executor with a path and a message.
_MAX_LINE_BYTES = 256 * 1024
_ERROR = b"error "
# Reading from the socket pauses at this many bytes of unread input.
_INPUT_BYTES = 1 << 20

Body = bytes | AsyncIterator[bytes] | None
Headers = Mapping[str, str]
"""Names in lower case."""


class BrokenReply(ConnectionError):
    """The received data is not a complete reply."""


class FailedReply(Exception):
    """The executor could not complete a reply that had begun. `body` is that of an error reply."""

    def __init__(self, body: bytes) -> None:
        super().__init__("the executor could not complete its reply")
        self.body = body


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.is_lost = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._input = bytearray()
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_reading_paused = False
        # One timer serves many waits, because creating a timer takes as long as reading a reply.
        self._silence_seconds, self._silence_deadline = 0.0, 0.0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._patience is not None:
            self._patience.cancel()
        for waiting in (self._arrival, self._room):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._input += data
        if self._arrival is not None:
            if not self._arrival.done():
                self._arrival.set_result(None)
        elif len(self._input) > _INPUT_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    @property
    def is_usable(self) -> bool:
        return not (self.is_lost or self._input or self._transport.is_closing())

    def abort(self) -> None:
        self._transport.abort()

    def become(self, protocol: asyncio.Protocol) -> None:
        """Hand the connection, including bytes already received, to the other protocol."""
        if self._patience is not None:
            self._patience.cancel()
        self._transport.set_protocol(protocol)
        if self._is_reading_paused:
            self._transport.resume_reading()
        protocol.connection_made(self._transport)
        if self.is_lost:
            protocol.connection_lost(None)
        elif self._input:
            protocol.data_received(bytes(self._input))

    async def send(self, head: bytes, body: Body) -> None:
        """Send a request; an upload is stopped if it is answered before its end. Raises OSError, TimeoutError."""
        if body is None or isinstance(body, bytes):
            self._transport.write(head + body if body else head)
            return
        self._transport.write(head)
        async for piece in body:
            if self.is_lost or self._input:
                return
            if piece:
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if self._room is not None:
                async with asyncio.timeout(STALL_SECONDS):
                    await self._room
        self._transport.write(b"0\r\n\r\n")

    async def read_head(self, silence_seconds: float) -> tuple[int, Headers]:
        """Return status and headers. Raises OSError, TimeoutError."""
        while (end := self._input.find(b"\r\n\r\n")) < 0:
            if len(self._input) > MAX_HEAD_BYTES:
                raise BrokenReply(f"received a reply head of more than {MAX_HEAD_BYTES} bytes")
            await self._more(silence_seconds)
        first, *lines = self._input[:end].decode("latin-1").split("\r\n")
        del self._input[: end + 4]
        version, _, rest = first.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (rest[:3].isascii() and rest[:3].isdigit()):
            raise BrokenReply(f"not HTTP: {first[:60]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(rest[:3]), headers

    async def body(self, headers: Headers, silence_seconds: float) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive. Raises OSError, TimeoutError, also if it ends too early."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while left := await self._chunk_size(silence_seconds):
                async for piece in self._take(left, silence_seconds):
                    yield piece
                if await self._line(silence_seconds):
                    raise BrokenReply("received a chunk longer than its size field")
            await self._line(silence_seconds)
            return
        async for piece in self._take(_length(headers), silence_seconds):
            yield piece

    async def _take(self, left: int, silence_seconds: float) -> AsyncIterator[bytes]:
        while left:
            if not self._input:
                await self._more(silence_seconds)
            piece = bytes(self._input[:left])
            del self._input[:left]
            left -= len(piece)
            yield piece

    async def _chunk_size(self, silence_seconds: float) -> int:
        line = await self._line(silence_seconds)
        if line.startswith(_ERROR):
            raise FailedReply(line.removeprefix(_ERROR))
        try:
            return int(line, 16)
        except ValueError:
            raise BrokenReply(f"not a chunk's size: {line[:60]!r}") from None

    async def _line(self, silence_seconds: float) -> bytes:
        while (end := self._input.find(b"\r\n")) < 0:
            if len(self._input) > _MAX_LINE_BYTES:
                raise BrokenReply("a chunk has no size line")
            await self._more(silence_seconds)
        line = bytes(self._input[:end])
        del self._input[: end + 2]
        return line

    async def _more(self, silence_seconds: float) -> None:
        if self.is_lost:
            raise BrokenReply("the executor has closed the connection")
        loop = asyncio.get_running_loop()
        arrival = self._arrival = loop.create_future()
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        self._silence_seconds, self._silence_deadline = silence_seconds, loop.time() + silence_seconds
        if self._patience is None or self._patience.when() > self._silence_deadline:
            self._set_silence_timer()
        before = len(self._input)
        try:
            await arrival
        finally:
            self._arrival = None
        if len(self._input) == before:
            raise BrokenReply("the executor has closed the connection")

    def _set_silence_timer(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = asyncio.get_running_loop().call_at(self._silence_deadline, self._close_silent)

    def _close_silent(self) -> None:
        self._patience = None
        if self._arrival is None or self._arrival.done():
            return
        if asyncio.get_running_loop().time() < self._silence_deadline:
            self._set_silence_timer()
        else:
            self._arrival.set_exception(TimeoutError(f"silent for {self._silence_seconds:g} s"))


class Connections:
    """Kept connections to one server. `connect` opens another one. `connect`, and everything here, raises OSError and
    TimeoutError.
    """

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._idle: list[Connection] = []

    async def ask(self, head: bytes, body: Body, silence_seconds: float) -> tuple[int, Headers, bytes]:
        """Make one exchange; return status, headers and whole body. `head` is the request's, with its empty line."""
        async with self.exchange(head, body, silence_seconds) as (status, headers, chunks):
            return status, headers, b"".join([chunk async for chunk in chunks])

    @asynccontextmanager
    async def exchange(
        self, head: bytes, body: Body, silence_seconds: float
    ) -> AsyncIterator[tuple[int, Headers, AsyncIterator[bytes]]]:
        """Make one exchange; yield status, headers, and the body as a stream. The connection is kept if the body was
        read to its end.
        """
        connection = self._kept() or await self._connect()
        is_over = False

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal is_over
            async for chunk in connection.body(headers, silence_seconds):
                yield chunk
            is_over = True

        try:
            await connection.send(head, body)
            status, headers = await connection.read_head(silence_seconds)
            yield status, headers, chunks()
        finally:
            self._give_back(connection, headers if is_over else None)

    def _give_back(self, connection: Connection, headers: Headers | None) -> None:
        """Keep the connection if possible. `headers` are those of the reply; None if the reply was not read completely."""
        # Close after an interrupted upload, which may still be in progress: its reply has `Connection: close`.
        if headers is not None and headers.get("connection", "").lower() != "close" and connection.is_usable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Close idle connections; active ones end with their exchange."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        oldest = time.monotonic() - KEPT_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None


def _length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        raise BrokenReply(f"a reply of unknown length ({length!r})")
    return int(length)
