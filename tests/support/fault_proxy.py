"""A reverse proxy that behaves like a network and a busy store: slow, with refusals, with lost replies."""

import asyncio
import contextlib
import io
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.s3 import serving

# Headers of a single connection, which must not be forwarded.
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


@dataclass
class FaultProxy:
    """Applies faults to requests. Chances are per request, 0 to 1; they may be changed while it serves."""

    upstream: int
    """Port of the real server."""
    seed: int = 0
    delay_seconds: float = 0
    """Delay before each request is forwarded."""
    unavailable: float = 0
    """Chance of an answer 503 instead of forwarding."""
    throttled: float = 0
    """Chance of an answer 429 instead of forwarding."""
    conflict: float = 0
    """Chance that a write is answered with 409 instead of being forwarded, as S3 does while another write of the key is
    under way.
    """
    lost_request: float = 0
    """Chance that the connection breaks before the request is forwarded."""
    lost_reply: float = 0
    """Chance that the request is forwarded and done, and the connection breaks before its reply."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and error code for each of the next requests, which are not forwarded."""
    down: bool = False
    """Whether every connection breaks."""
    port: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """Requests by method, and faults by name."""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["FaultProxy"]:
        """Serve on a free port of the loopback."""
        self._random = random.Random(self.seed)
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        async with aiohttp.ClientSession(auto_decompress=False) as self._session, serving(application) as self.port:
            yield self

    def _happens(self, name: str, chance: float) -> bool:
        happens = self._random.random() < chance
        self.seen[name] += happens
        return happens

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen[request.method] += 1
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self.down or self._happens("lost request", self.lost_request):
            return _break(request)
        if self.refusals:
            return _error(*self.refusals.pop(0))
        if self._happens("unavailable", self.unavailable):
            return _error(503, "SlowDown")
        if self._happens("throttled", self.throttled):
            return _error(429, "TooManyRequests")
        if request.method == "PUT" and self._happens("conflict", self.conflict):
            return _error(409, "ConditionalRequestConflict")
        reply = await self._forward(request, body)
        return _break(request) if self._happens("lost reply", self.lost_reply) else reply

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        # The Host header stays the client's: it is part of the signature.
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = f"http://127.0.0.1:{self.upstream}{request.raw_path}"
        target = URL(url, encoded=True)
        async with self._session.request(request.method, target, headers=headers, data=io.BytesIO(body)) as upstream:
            content = await upstream.read()
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP}
            if request.method != "HEAD":
                kept.pop("Content-Length", None)
            return web.Response(status=upstream.status, headers=kept, body=content)


def _break(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.close()
    return web.Response()


def _error(status: int, code: str) -> web.Response:
    return web.Response(
        status=status, content_type="application/xml", text=f"<Error><Code>{code}</Code><Message/></Error>"
    )
