"""Serves a workspace's model port (docs/executor.md) over connections that this process opens to the executor.

Each connection carries one request, and is an ordinary HTTP connection to aiohttp's server once its request comes. A few
wait at any time; where one is taken, another takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from agent_runtime.sandboxes.base import Fenced, SandboxFailure, WorkspaceLimit
from agent_runtime.sandboxes.executor_client import REPLY_SECONDS, RETRY_PAUSES, ExecutorClient, Hold, refusal

# What the connection becomes, in the Upgrade header.
UPGRADE = "rollout-model"
# The second request of a burst starts at once; each later one some milliseconds later, which no model call notices.
WAITING_CONNECTIONS = 2
# From a request to the next wait for one: no workspace takes more than some 200 requests a second of a runner's time.
REST_SECONDS = 0.01
# Of a silent connection: sooner than NAT tables forget it, and soon enough to notice an executor whose machine has gone.
SILENCE_SECONDS = 15

# Of an executor's refusal; its messages are a few hundred bytes.
MAX_REPLY_BYTES = 64 * 1024
_REPLY = re.compile(
    rb"HTTP/1\.1 (?P<status>\d{3})\b.*?(?:\r\nContent-Length: (?P<size>\d{1,5})(?:\r\n.*)?)?", re.DOTALL | re.IGNORECASE
)

log = logging.getLogger(__name__)


class Carrier(asyncio.Protocol):
    """One connection: attached by `attach`, then waiting until a request comes, then the server's.

    `taken` ends with whether a request came before the connection was lost.
    """

    def __init__(self, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[bool] = loop.create_future()
        self.transport: asyncio.Transport
        self._server = server
        self._reply: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._input = b""

    async def attach(self, call: bytes) -> tuple[int, bytes]:
        """Status and body of the executor's reply; after status 101 it waits for a request. Raises OSError, TimeoutError."""
        self.transport.write(call)
        async with asyncio.timeout(REPLY_SECONDS):
            return await self._reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._reply.done():
            self._reply.set_exception(exc or ConnectionResetError("the executor has closed the connection"))
        if not self.taken.done():
            self.taken.set_result(False)

    def data_received(self, data: bytes) -> None:
        self._input += data
        if not self._reply.done():
            self._read_reply()
        if self._input and self._reply.done() and not self.taken.done():
            handler = self._server()
            self.transport.set_protocol(handler)
            handler.connection_made(self.transport)
            handler.data_received(self._input)
            self.taken.set_result(True)

    def _read_reply(self) -> None:
        head, end, rest = self._input.partition(b"\r\n\r\n")
        found = _REPLY.fullmatch(head)
        size = int(found["size"] or 0) if found else 0
        # A request may follow at once, of any size. But a sandbox is not trusted to be what it was.
        if len(head) > MAX_REPLY_BYTES or size > MAX_REPLY_BYTES or (end and not found):
            self.transport.abort()
        elif end and found and len(rest) >= size:
            status = int(found["status"])
            self._reply.set_result((status, rest[:size]))
            self._input = rest[size:]


class ModelPort:
    """Keeps connections waiting for requests."""

    def __init__(self, client: ExecutorClient, hold: Hold, path: str, server: web.Server) -> None:
        self._client, self._hold, self._path, self._server = client, hold, path, server
        self._transports: set[asyncio.Transport] = set()

    async def serve(self) -> None:
        """Go on until this is cancelled, or the executor refuses: then the workspace is lost, or another runner's, and
        whatever else is asked of it says so too.
        """
        pauses = 0
        while True:
            try:
                carrier = await self._attach()
                if await carrier.taken:
                    pauses = 0
                    await asyncio.sleep(REST_SECONDS)
                    continue
                reason = "the connection was closed"
            except (Fenced, WorkspaceLimit, SandboxFailure) as end:
                log.info("model port of %s: %s", self._path, end)
                return
            except (OSError, TimeoutError) as error:
                reason = f"{type(error).__name__} {error}"
            log.info("model port of %s: attached again, for %s", self._path, reason)
            await asyncio.sleep(RETRY_PAUSES[min(pauses, len(RETRY_PAUSES) - 1)])
            pauses += 1

    def close(self) -> None:
        """Cut all connections, those with a request at work too."""
        for transport in self._transports:
            transport.abort()

    async def _attach(self) -> Carrier:
        lines = {
            "Host": "executor",
            **self._client.authorization(),
            **self._hold.headers(None),
            "Connection": "Upgrade",
            "Upgrade": UPGRADE,
            "Content-Length": "0",
        }
        head = [f"POST /v1{self._path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
        carrier = await self._client.connect(lambda: Carrier(self._server))
        self._transports = {known for known in self._transports if not known.is_closing()} | {carrier.transport}
        try:
            status, body = await carrier.attach(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
            if status != 101:
                raise refusal(status, body, f"POST {self._path}")
        except BaseException:
            carrier.transport.abort()
            raise
        return carrier


@asynccontextmanager
async def serve_model(
    client: ExecutorClient, hold: Hold, workspace_path: str, server: web.Server
) -> AsyncIterator[str]:
    """See Workspace."""
    path = f"{workspace_path}/model"
    url: str = (await client.call("PUT", path, hold=hold)).json()["url"]
    port = ModelPort(client, hold, path, server)
    waiting = [asyncio.create_task(port.serve()) for _ in range(WAITING_CONNECTIONS)]
    try:
        yield url
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        port.close()
