"""The model port: HTTP on a workspace's loopback, forwarded to the runner over connections that the runner has opened.

A request is read completely before it is forwarded, so a slow client does not occupy a runner. Each of the runner's
connections serves one request; the reply is passed through unchanged. A request is kept until its reply begins. If the
runner dies before that, the next connection gets the request again. A reply that has begun ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from typing import Any, BinaryIO

from agent_runtime.executor.attempts import Hold
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.http.messages import Head, PassedReply
from agent_runtime.executor.http.server import Request, Server, notice_silence
from agent_runtime.executor.timing import Notifier

# The protocol to which a runner's connection is upgraded, in the Upgrade header of the call that attaches it.
UPGRADE = "rollout-model"
# The same limit as the network proxy's, with room for agents with sub-agents. It also limits the requests in flight.
MAX_CONNECTIONS = 128
# Anthropic takes requests of 32 MB, the largest of the known APIs.
MAX_BODY_BYTES = 32 * 1024 * 1024
# Most bytes of all waiting requests of one workspace. Bodies over SMALL_BODY_BYTES are on disk.
MAX_HELD_BYTES = 64 * 1024 * 1024
SMALL_BODY_BYTES = 64 * 1024
# Time limit for a client that stops reading a reply, because it may process the first part before it continues. Usual
# clients wait as long for an answer.
REPLY_STALL_SECONDS = 600.0
# A request that repeatedly crashes its runner must not crash all runners.
MAX_CONNECTIONS_LOST = 5
# A port without a connection for this time has no runner. A live runner opens the next one within milliseconds, so
# programs cannot use up all connections.
ABSENT_SECONDS = 5.0
# Buffer size in the kernel and in this process for each direction of a connection; a full buffer blocks the writer.
BUFFER_BYTES = 64 * 1024
# The header in which the packages of OpenAI and Anthropic number their retries.
_RETRY_COUNT = "x-stainless-retry-count"
# Hop-by-hop headers (RFC 9110 section 7.6.1), and headers of the framing, which this module sets.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "trailer", "upgrade", "expect"}
    | {"transfer-encoding", "content-length", "http2-settings"}
)


def forwarded_head(head: Head, body_bytes: int, idempotency_key: str) -> bytes:
    """Return the head for the runner: the client's own, with one unambiguous framing.

    A request without an idempotency key gets this one, so that a repeat through another runner is recognised. Retries
    of a client that numbers them are recognised by number; a separate key would make each a new request.
    """
    headers = {name: value for name, value in head.headers.items() if name not in _HOP_BY_HOP}
    if headers.get(_RETRY_COUNT, "0") == "0":
        headers.setdefault("idempotency-key", idempotency_key)
    headers |= {"content-length": str(body_bytes), "connection": "close"}
    lines = [f"{head.method} {head.target} {head.version}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class HeldBody:
    """A request's body: in memory while it is small, then in an unnamed file, which disappears when it is closed."""

    def __init__(self, folder: str) -> None:
        self.size = 0
        self._folder = folder
        self._content: BinaryIO = BytesIO()

    def add(self, piece: bytes) -> None:
        """Append data. Raises OSError."""
        if self.size <= SMALL_BODY_BYTES < self.size + len(piece):
            path = os.path.join(self._folder, f"{os.urandom(16).hex()}-body")
            file = open(path, "x+b")  # noqa: SIM115 - `close` does
            os.unlink(path)
            self._content.seek(0)
            file.write(self._content.read())
            self._content = file
        self._content.write(piece)
        # A full disk must be detected now, while the client can still get the error.
        self._content.flush()
        self.size += len(piece)

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole body from the start."""
        self._content.seek(0)
        while piece := self._content.read(BUFFER_BYTES):
            yield piece

    def close(self) -> None:
        """Free its memory or file."""
        # Closing writes buffered data again, which fails on a full disk. The data is no longer needed.
        with contextlib.suppress(OSError):
            self._content.close()


class RunnerConnection(asyncio.Protocol):
    """One connection of a runner, free until it carries a request."""

    def __init__(self, port: ModelPort, hold: Hold) -> None:
        self.hold = hold
        self.is_lost = False
        self._port = port
        self._is_free = True
        self._transport: asyncio.Transport
        self._input = bytearray()
        self._is_writing_paused = False
        self._changed = Notifier()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        notice_silence(transport.get_extra_info("socket"))
        self._port.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._port.lose(self)
        self._changed.notify()

    def data_received(self, data: bytes) -> None:
        if self._is_free:
            # A reply without a request: this peer is not one of our runners.
            self.abort()
            return
        self._input += data
        if len(self._input) > BUFFER_BYTES:
            self._transport.pause_reading()
        self._changed.notify()

    def pause_writing(self) -> None:
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._changed.notify()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._transport.abort()

    async def send(self, pieces: Iterator[bytes]) -> None:
        """Send the request; end early if the connection is lost or its reply begins."""
        self._is_free = False
        for piece in pieces:
            while self._is_writing_paused and not self.is_lost and not self._input:
                await Notifier.wait(self._changed)
            if self.is_lost or self._input:
                return
            self._transport.write(piece)

    async def receive(self) -> bytes:
        """Return the next bytes of the reply; none if the connection has ended."""
        while not self._input and not self.is_lost:
            await Notifier.wait(self._changed)
        data = bytes(self._input)
        self._input.clear()
        self._transport.resume_reading()
        return data


class Exchange:
    """One request and its reply, as `Chunks` of a PassedReply."""

    def __init__(self, port: ModelPort, head: bytes, body: HeldBody) -> None:
        self._port, self._head, self._body = port, head, body
        self._connection: RunnerConnection | None = None
        self._has_reply = False

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> bytes:
        if self._has_reply:
            assert self._connection is not None
            data = await self._connection.receive()
        else:
            data = await self._first()
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        if self._connection is not None:
            self._connection.abort()
        if not self._has_reply:
            self._port.give_up()
            self._release()
        self._port.answering.discard(self)

    async def _first(self) -> bytes:
        """Return the first bytes of the reply. Raises NoPlace after too many lost connections."""
        for lost in range(MAX_CONNECTIONS_LOST):
            self._connection = await self._port.free_connection(is_repeated=lost > 0)
            self._port.answering.add(self)
            await self._connection.send(chain([self._head], self._body.pieces()))
            if data := await self._connection.receive():
                self._has_reply = True
                self._port.missed = 0
                self._release()
                return data
            self._port.answering.discard(self)
        raise ApiError(
            "NoPlace",
            f"the model request failed: {MAX_CONNECTIONS_LOST} connections to runners were lost while they handled it",
        )

    def _release(self) -> None:
        self._body.close()
        self._port.held_bytes -= self._body.size


class ModelPort:
    """The model port of one workspace. Programs reach it at `url`; `folder` holds waiting bodies."""

    def __init__(self, listener: socket.socket, folder: str) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.held_bytes = 0
        self.missed = 0
        """Requests that were given up while no runner served the port, since the last reply."""
        self.answering: set[Exchange] = set()
        self._folder = folder
        self._server = Server(self._answer, MAX_CONNECTIONS)
        self._connections: set[RunnerConnection] = set()
        self._unserved_since = asyncio.get_running_loop().time()
        self._free: dict[RunnerConnection, None] = {}
        self._waiting: deque[asyncio.Future[RunnerConnection]] = deque()

    @classmethod
    async def open(cls, listener: socket.socket, folder: str) -> ModelPort:
        """Take over and serve a listening socket."""
        # Accepted connections inherit them.
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        port = cls(listener, folder)
        await port._server.listen_on(listener)
        return port

    def describe(self) -> dict[str, Any]:
        """Return its address, and the numbers of waiting, forwarded and missed requests."""
        counts = {"waiting": len(self._waiting), "answering": len(self.answering), "missed": self.missed}
        return {"url": self.url, **counts}

    def attach(self, hold: Hold) -> RunnerConnection:
        """Return the protocol of a further connection of this runner."""
        return RunnerConnection(self, hold)

    def detach_all_but(self, hold: Hold) -> None:
        """Close the connections of all other runners. Requests that they had not begun to answer wait for this one."""
        for connection in [connection for connection in self._connections if connection.hold != hold]:
            connection.abort()
            self._free.pop(connection, None)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def admit(self, connection: RunnerConnection) -> None:
        """Assign a new connection to the request that has waited longest."""
        self._connections.add(connection)
        self._offer(connection)

    def give_up(self) -> None:
        """Record the end of a request that got no reply."""
        now = asyncio.get_running_loop().time()
        self.missed += not self._connections and now - self._unserved_since >= ABSENT_SECONDS

    def lose(self, connection: RunnerConnection) -> None:
        """Handle the end of a connection."""
        self._connections.discard(connection)
        self._free.pop(connection, None)
        if not self._connections:
            self._unserved_since = asyncio.get_running_loop().time()

    async def free_connection(self, *, is_repeated: bool) -> RunnerConnection:
        """Wait for a free connection for a request. Repeated requests take precedence."""
        if self._free:
            return self._free.popitem()[0]
        waiter: asyncio.Future[RunnerConnection] = asyncio.get_running_loop().create_future()
        if is_repeated:
            self._waiting.appendleft(waiter)
        else:
            self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._offer(waiter.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiter)

    def _offer(self, connection: RunnerConnection) -> None:
        if connection.is_lost:
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            # A request that was just cancelled may still be in the queue.
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._free[connection] = None

    async def _answer(self, request: Request) -> PassedReply:
        head = request.head
        self._require_room(head.body_length() or 0, self.held_bytes)
        body = HeldBody(self._folder)
        try:
            async for piece in request.chunks():
                self._require_room(body.size + len(piece), self.held_bytes - body.size)
                body.add(piece)
                self.held_bytes += len(piece)
        except BaseException as error:
            body.close()
            self.held_bytes -= body.size
            if isinstance(error, OSError):
                raise ApiError("NoPlace", f"body: cannot be stored ({error}); try again later") from error
            raise
        # The request is complete. Over the connection limit, only incomplete ones are closed, oldest first.
        request.trust()
        exchange = Exchange(self, forwarded_head(head, body.size, os.urandom(16).hex()), body)
        return PassedReply(exchange, REPLY_STALL_SECONDS)

    def _require_room(self, size: int, others: int) -> None:
        """Raise TooLarge or NoPlace if a body of `size` bytes does not fit in addition to those of other requests."""
        if size > MAX_BODY_BYTES:
            raise ApiError("TooLarge", f"body: at most {MAX_BODY_BYTES} bytes are accepted here")
        if size + others > MAX_HELD_BYTES:
            raise ApiError("NoPlace", f"requests that wait for the model hold {others} bytes; try again later")
