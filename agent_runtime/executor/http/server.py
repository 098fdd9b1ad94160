"""A small HTTP/1.1 server: connections, bodies, time limits. The application handles the requests."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256

from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.http.messages import (
    MAX_CHUNK_LINE_BYTES,
    MAX_HEAD_BYTES,
    Head,
    PassedReply,
    Reply,
    StreamedReply,
    Switched,
    error_reply,
    failed_chunk,
    read_chunk_size,
    read_head,
)

# Time limit for a request's head, which usually is one packet; half of nginx's default.
HEAD_SECONDS = 30.0
# Time limit between two pieces of an unauthenticated request's body, and between two reads of a reply.
STALL_SECONDS = 60.0
# Time limit between two pieces of a runner's body, which it reads from storage that may be slow, or unavailable for 10
# minutes.
UPLOAD_STALL_SECONDS = 3600.0
# Usual clients close idle connections after 15 s to 90 s. With our longer limit, they close first.
KEEP_ALIVE_SECONDS = 300.0
# How long the rest of a refused body is read, so that the client gets the reply; it needs one round trip.
LINGER_SECONDS = 1.0
# A runner whose machine died sends nothing. After SILENCE_SECONDS the kernel probes the connection every PROBE_SECONDS,
# and closes it when nothing was acknowledged for STALL_SECONDS.
SILENCE_SECONDS, PROBE_SECONDS = 15, 5
# More than runners ever open (one for each running call). Beyond it, unauthenticated connections are closed first.
MAX_CONNECTIONS = 1024
# Reading from the socket pauses at this many bytes of unread input.
_INPUT_BYTES = 256 * 1024
# An unread rest of a body up to this size is read and discarded; with a longer one the connection is closed.
_REST_BYTES = 256 * 1024

AnyReply = Reply | StreamedReply | PassedReply | Switched
Application = Callable[["Request"], Awaitable[AnyReply]]


class Disconnected(Exception):
    """The client disconnected while sending its request's body."""


class Request:
    """A request in progress. Its body is read at most once: by `read` or `chunks`."""

    def __init__(self, head: Head, connection: Connection, length: int | None) -> None:
        self.head = head
        self.body_complete = length == 0
        # SHA-256 of the body, once it is complete.
        self.body_digest = sha256().digest() if length == 0 else None
        self._connection = connection
        self._left = length
        self._wants_continue = length != 0 and head.headers.get("expect", "").lower() == "100-continue"

    @property
    def line(self) -> str:
        """Method and target. Repeats with the same key must have the same."""
        return f"{self.head.method} {self.head.target}"

    def trust(self) -> None:
        """Mark the connection as authenticated, so that it is not closed when there are too many."""
        self._connection.trusted = True

    async def read(self, limit: int) -> bytes:
        """Read the whole body. Raises TooLarge over `limit` bytes."""
        if self._left is not None and self._left > limit:
            raise ApiError("TooLarge", f"body of {self._left} bytes: at most {limit} are accepted here")
        if self._left and (body := self._connection.take_at_once(self._left)):
            self._left = 0
            self.body_complete, self.body_digest = True, sha256(body).digest()
            return body
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise ApiError("TooLarge", f"body: at most {limit} bytes are accepted here")
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive. Raises BadRequest for a malformed body or a stall, and Disconnected."""
        if self.body_complete:
            return
        if self._wants_continue:
            self._wants_continue = False
            self._connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        digest = sha256()
        if self._left is None:
            while size := read_chunk_size(await self._connection.take_line()):
                while size:
                    piece = await self._connection.take(size)
                    size -= len(piece)
                    digest.update(piece)
                    yield piece
                if await self._connection.take_line():
                    raise bad_request("chunked body: a chunk is longer than its size field")
            while await self._connection.take_line():
                pass
        else:
            while self._left:
                piece = await self._connection.take(self._left)
                self._left -= len(piece)
                digest.update(piece)
                yield piece
        self.body_complete = True
        self.body_digest = digest.digest()

    async def digest(self) -> bytes:
        """Return the SHA-256 of the body, which is read and discarded. Raises the errors of `chunks`."""
        async for _ in self.chunks():
            pass
        assert self.body_digest is not None
        return self.body_digest

    async def discard_body(self) -> bool:
        """Read and discard the rest of the body; False if that is impossible and the connection must be closed."""
        if self.body_complete:
            return True
        if self._wants_continue or self._left is None or self._left > _REST_BYTES:
            return False
        await self.digest()
        return True


class Connection(asyncio.Protocol):
    """One connection, which handles its requests in order."""

    def __init__(self, server: Server) -> None:
        self.trusted = False
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]
        self._buffer = bytearray()
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_closed = False
        self._is_lingering = False
        self._is_handed_over = False
        # The deadline for the client's next bytes; None while the request is being handled.
        self.deadline: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.admit(self)
        self._task = self._loop.create_task(self._serve())

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._server.connections.pop(self, None)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        # This connection's task only waits: calls with effects run in separate tasks.
        self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        self._buffer += data
        if self._arrival is not None:
            if not self._arrival.done():
                self._arrival.set_result(None)
        elif len(self._buffer) > _INPUT_BYTES:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def abort(self) -> None:
        """Close the connection immediately."""
        self._transport.abort()

    def send(self, data: bytes) -> None:
        """Write without waiting."""
        self._transport.write(data)

    def take_at_once(self, count: int) -> bytes:
        """Return this many bytes of the body, or none until all have arrived."""
        if len(self._buffer) < count:
            return b""
        return self._taken(count)

    async def take(self, most: int) -> bytes:
        """Return the next 1 to `most` bytes of the body."""
        if not self._buffer:
            await self._more_body()
        return self._taken(most)

    def _taken(self, most: int) -> bytes:
        piece = bytes(self._buffer[:most])
        del self._buffer[:most]
        return piece

    async def take_line(self) -> bytes:
        """Return the next line of a chunked body's framing, without its end."""
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > MAX_CHUNK_LINE_BYTES:
                raise bad_request(f"chunked body: a line of framing is over {MAX_CHUNK_LINE_BYTES} bytes")
            await self._more_body()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    async def _more_body(self) -> None:
        await self._more(time.monotonic() + (UPLOAD_STALL_SECONDS if self.trusted else STALL_SECONDS))

    async def _more(self, deadline: float) -> None:
        if self._is_closed:
            raise Disconnected
        self.deadline = deadline
        self._arrival = self._loop.create_future()
        self._transport.resume_reading()
        try:
            await self._arrival
        finally:
            self._arrival = None
            self.deadline = None
        if self._is_closed:
            raise Disconnected

    async def _drain(self, stall_seconds: float = STALL_SECONDS) -> None:
        if self._room is not None:
            self.deadline = time.monotonic() + stall_seconds
            await self._room
            self.deadline = None

    async def _serve(self) -> None:
        try:
            while await self._serve_one():
                pass
        except ApiError as error:
            self.send(error_reply(error).encoded(keep_alive=False))
        except Disconnected:
            pass
        except Exception:  # noqa: BLE001 - a defect must only end its own connection
            log_defect("connection")
            self._transport.abort()
        if not self._is_handed_over:
            await self._linger()

    async def _linger(self) -> None:
        """Close gracefully, so that a client that still sends its body can read the reply. A reset would discard it."""
        self._is_lingering = True
        self._buffer.clear()
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()
            await asyncio.sleep(LINGER_SECONDS)
        self._transport.close()

    async def _serve_one(self) -> bool:
        if not self._buffer:
            await self._more(time.monotonic() + KEEP_ALIVE_SECONDS)
        # One limit for the whole head, also for a client that sends it byte by byte.
        head_ends = time.monotonic() + HEAD_SECONDS
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ApiError("TooLarge", f"request head: at most {MAX_HEAD_BYTES} bytes are accepted")
            await self._more(head_ends)
        if end > MAX_HEAD_BYTES:
            raise ApiError("TooLarge", f"request head: at most {MAX_HEAD_BYTES} bytes are accepted")
        head = read_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        request = Request(head, self, head.body_length())
        try:
            reply = await self._server.application(request)
        except ApiError as error:
            reply = error_reply(error)
        except Disconnected:
            raise
        except Exception:  # noqa: BLE001 - the caller gets InternalError, the log the exception
            log_defect(f"{head.method} {head.path}")
            reply = error_reply(ApiError("InternalError", "an internal error of the executor; see its standard error"))
        if isinstance(reply, Switched):
            self._hand_over(reply)
            return False
        try:
            keep_alive = head.keep_alive and (request.body_complete or await self._discards_rest(request))
            if isinstance(reply, Reply):
                self.send(reply.encoded(keep_alive))
            else:
                keep_alive = keep_alive and isinstance(reply, StreamedReply)
                await self._stream(reply, keep_alive)
            await self._drain()
        finally:
            if not isinstance(reply, Reply):
                await reply.chunks.aclose()
        return keep_alive

    async def _discards_rest(self, request: Request) -> bool:
        try:
            return await request.discard_body()
        except ApiError:
            return False

    async def _stream(self, reply: StreamedReply | PassedReply, keep_alive: bool) -> None:
        try:
            if isinstance(reply, PassedReply):
                async for chunk in reply.chunks:
                    self.send(chunk)
                    await self._drain(reply.stall_seconds)
                return
            self.send(reply.head(keep_alive))
            async for chunk in reply.chunks:
                self.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                await self._drain()
        except ApiError as error:
            log(event="stream cut", code=error.code, message=error.message)
            if isinstance(reply, StreamedReply):
                self.send(failed_chunk(error))
            else:
                self._transport.abort()
            raise Disconnected from None
        self.send(b"0\r\n\r\n")

    def _hand_over(self, reply: Switched) -> None:
        """Hand the connection, including bytes already received, to the other protocol."""
        self._is_handed_over = True
        self._server.connections.pop(self, None)
        self._server.handed_over.add(self._transport)
        self.send(reply.head())
        self._transport.set_protocol(reply.protocol)
        self._transport.resume_reading()
        reply.protocol.connection_made(self._transport)
        if self._buffer:
            reply.protocol.data_received(bytes(self._buffer))


class Server:
    """Listens, and limits the number of connections."""

    def __init__(self, application: Application, max_connections: int = MAX_CONNECTIONS) -> None:
        self.application = application
        self._max_connections = max_connections
        self.connections: dict[Connection, None] = {}
        self.handed_over = weakref.WeakSet[asyncio.Transport]()
        """Connections that another protocol has taken over."""
        self._sweep: asyncio.TimerHandle | None = None

    async def listen(self, address: str) -> str:
        """Listen at `unix:PATH` or `tcp:HOST:PORT`; return the actual address."""
        loop = asyncio.get_running_loop()
        kind, _, place = address.partition(":")
        if kind == "unix":
            self._listener = await loop.create_unix_server(lambda: Connection(self), place, backlog=1024)
            return address
        host, _, port = place.rpartition(":")
        self._listener = await loop.create_server(
            lambda: Connection(self), host.strip("[]") or None, int(port), backlog=1024
        )
        return f"tcp:{host}:{self._listener.sockets[0].getsockname()[1]}"

    async def listen_on(self, listener: socket.socket) -> None:
        """Take over and serve a listening socket."""
        self._listener = await asyncio.get_running_loop().create_server(lambda: Connection(self), sock=listener)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._listener.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            connection.abort()
        # A command that came now would fail because its workspace is being destroyed, which does not say why.
        for transport in list(self.handed_over):
            transport.abort()

    def admit(self, connection: Connection) -> None:
        """Count a new connection. Over the limit, the oldest unauthenticated one is closed, or else the new one."""
        self.connections[connection] = None
        if len(self.connections) > self._max_connections:
            next((known for known in self.connections if not known.trusted), connection).abort()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(1, self._close_overdue)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections):
            if connection.deadline is not None and connection.deadline < now:
                connection.abort()
        self._sweep = asyncio.get_running_loop().call_later(1, self._close_overdue) if self.connections else None


def notice_silence(connection: socket.socket) -> None:
    """Have the kernel close a connection whose other end disappeared without closing it."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALL_SECONDS * 1000))


def log(**fields: object) -> None:
    """Write one line of JSON to standard error."""
    print(json.dumps(fields, default=str), file=sys.stderr, flush=True)


def log_defect(where: str) -> None:
    """Log the current exception for developers."""
    log(event="defect", where=where, traceback=traceback.format_exc())
