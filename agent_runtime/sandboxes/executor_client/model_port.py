"""Serves a workspace's model port (docs/executor-model-port.md) over connections that this process opens to the executor.

Each connection carries one request, and becomes an ordinary HTTP connection to aiohttp's server when its request
arrives. A few connections always wait; a used one is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from agent_runtime.sandboxes.base import Fenced, SandboxFailure, WorkspaceLimit
from agent_runtime.sandboxes.executor_client.client import RETRY_PAUSES, ExecutorClient, Hold

# The protocol to which the connection is upgraded, in the Upgrade header.
UPGRADE = "rollout-model"
# Connections that wait for requests: two requests of a burst start immediately, each later one some milliseconds later.
WAITING_CONNECTIONS = 2
# Pause before a used connection is replaced. It limits a workspace to some 200 requests a second.
REST_SECONDS = 0.01
# TCP keep-alive of a silent connection: keeps NAT entries, and detects an executor whose machine died.
SILENCE_SECONDS = 15

log = logging.getLogger(__name__)


class ModelConnection(asyncio.Protocol):
    """One connection: waits until a request arrives, and then belongs to the server.

    `taken` resolves to whether a request arrived before the connection was lost.
    """

    def __init__(self, server: web.Server) -> None:
        self.taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.taken.done():
            self.taken.set_result(False)

    def data_received(self, data: bytes) -> None:
        handler = self._server()
        self.transport.set_protocol(handler)
        handler.connection_made(self.transport)
        handler.data_received(data)
        self.taken.set_result(True)


class ModelPort:
    """Keeps connections waiting for requests."""

    def __init__(self, client: ExecutorClient, hold: Hold, path: str, server: web.Server) -> None:
        self._client, self._hold, self._path, self._server = client, hold, path, server
        self._transports: set[asyncio.Transport] = set()

    async def serve(self) -> None:
        """Run until this is cancelled, or the executor refuses because the workspace is lost or belongs to another
        runner.
        """
        pauses = 0
        while True:
            try:
                connection = await self._attach()
                if await connection.taken:
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
        """Close all connections, including those with a request in progress."""
        for transport in self._transports:
            transport.abort()

    async def _attach(self) -> ModelConnection:
        connection = await self._client.attach(self._path, UPGRADE, lambda: ModelConnection(self._server), self._hold)
        self._transports = {known for known in self._transports if not known.is_closing()} | {connection.transport}
        return connection


@asynccontextmanager
async def serve_model(
    client: ExecutorClient, hold: Hold, workspace_path: str, server: web.Server
) -> AsyncIterator[str]:
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
