"""One address for the model calls of many trials: each finds the trial whose key it brings.

Agents on other machines reach a worker through one port. A key is a segment of the path (`/{key}/v1`, where PR #83 has the
trial's id) or a bearer token.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from aiohttp import web

from agent_runtime.proxy.http import request_key
from agent_runtime.proxy.keys import session_of


@dataclass
class Reached:
    """How the agent of a trial reaches its model."""

    url: str
    """Base URL, up to `/v1`, with the key in its path."""
    key: str
    failure: str | None = None
    """Set when the session ends: why the agent's latest call got no answer, where nothing in this process shows it."""


class Front:
    """Listens from the first `open` to the last `close`. `url` is how agents reach it."""

    def __init__(self, host: str, port: int, known_as: str) -> None:
        self._host, self._port, self._known_as = host, port, known_as
        self._trials: dict[str, web.Server] = {}
        self._calls: dict[str, set[asyncio.Task[web.StreamResponse]]] = {}
        self._runner: web.AppRunner | None = None
        self._users = 0
        self._changing = asyncio.Lock()
        self.url = ""

    async def open(self) -> None:
        """Listen. Raises OSError, as for a port that another worker of this machine has."""
        async with self._changing:
            self._users += 1
            if self._runner is not None:
                return
            app = web.Application(client_max_size=0)
            app.router.add_route("*", "/{path:.*}", self._carry)
            # Paths may have keys in them, so there is no access log.
            self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
            await self._runner.setup()
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
            self.url = f"http://{self._known_as}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Listen no more, once all have closed it."""
        async with self._changing:
            self._users -= 1
            if self._users == 0 and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    @contextlib.asynccontextmanager
    async def serving(self, secrets: Iterable[str], server: web.Server) -> AsyncIterator[str]:
        """Let `server` answer the calls with keys of these secrets while the context is open; then they break off."""
        mine = list(secrets)
        self._trials |= dict.fromkeys(mine, server)
        try:
            yield self.url
        finally:
            for secret in mine:
                self._trials.pop(secret, None)
                for call in self._calls.pop(secret, set()):
                    call.cancel()

    @contextlib.asynccontextmanager
    async def session(self, key: str, model: str) -> AsyncIterator[Reached]:
        """How the agent of the trial with this key reaches the model of that name while the context is open."""
        yield Reached(f"{self.url}/{key}/v1", key)

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        segment = request.path.split("/")[1]
        key = segment if session_of(segment) is not None else request_key(request.headers) or ""
        secret = key.rpartition(".")[2]
        server = self._trials.get(secret)
        if server is None:
            # The attempt has ended, or was never here: whatever calls now must not make a model work.
            error = {"message": "no trial has this key; it has ended, or never was", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401, headers={"x-should-retry": "false"})
        call = asyncio.ensure_future(server.request_handler(request))
        calls = self._calls.setdefault(secret, set())
        calls.add(call)
        try:
            return await call
        finally:
            call.cancel()
            calls.discard(call)
            if not calls:
                self._calls.pop(secret, None)
