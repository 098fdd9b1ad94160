"""Forwarding of one request to the engine and of its answer, both streamed without buffering.

If the client disconnects, the engine's connection is closed too, and the engine stops generating.
"""

import io
import logging
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agent_runtime.serving.engine import CONNECT_SECONDS
from rollout_api.cluster import ENGINE_PROCESS_HEADER, SERVER_NOT_READY

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 2.0
"""Unused connections are closed after this time, before the engine closes them (uvicorn: after 5 s) while a request is
sent.
"""
RETRY_SECONDS: Final = 5
"""Value of Retry-After: the operator opens an engine with its policy within seconds."""
MOST_LINE: Final = 64 * 1024
"""Most bytes of a header line from the engine."""

HOP_BY_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    )
)
"""Headers of one connection (RFC 9110, 7.6.1)."""
NOT_FORWARDED: Final = HOP_BY_HOP | {"host", "authorization", ENGINE_PROCESS_HEADER.lower()}
"""Request headers that are not forwarded: the engine needs no keys."""

BODY_HEADERS: Final = frozenset({"content-length", "content-encoding"})
"""Request headers that are dropped if the body is replaced or decoded."""


def engine_session() -> aiohttp.ClientSession:
    """Return a session with unlimited connections to the engine, without a time limit or decoding."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=MOST_LINE,
        max_field_size=MOST_LINE,
    )


async def forward(
    request: web.Request,
    engine: aiohttp.ClientSession,
    engine_url: str,
    refusal: Callable[[], web.Response | None],
    headers: Mapping[str, str],
    body: bytes | None = None,
) -> web.StreamResponse:
    """Forward one request, and its answer with further `headers`. `body` replaces the request's own body.

    `refusal` is called before the request is sent, and when the answer begins. If it returns a response, that replaces
    the engine's answer. Later parts come from the same process, because they come through the same connection.
    """
    if (refused := refusal()) is not None:
        return refused
    is_own = body is None and "Content-Encoding" not in request.headers  # which the server has decoded
    left_out = NOT_FORWARDED if is_own else NOT_FORWARDED | BODY_HEADERS
    data: aiohttp.StreamReader | io.BytesIO | None = request.content if request.can_read_body else None
    if body is not None:
        data = io.BytesIO(body)  # aiohttp sends it in pieces, so that a large one does not delay other calls
    try:
        upstream = await engine.request(
            request.method,
            _at(engine_url, request),
            headers=_without(request.headers, left_out),
            data=data,
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
    except (aiohttp.ClientError, OSError) as error:
        return unavailable(f"the engine does not answer: {error}")
    async with upstream:
        if (refused := refusal()) is not None:
            return refused
        answer = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=_without(upstream.headers, HOP_BY_HOP)
        )
        answer.headers.update(headers)
        await answer.prepare(request)
        try:
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            # Abort the connection, so that an incomplete answer does not look complete.
            log.warning("%s %s: cut off: %s", request.method, request.path, error)
            if request.transport is not None:
                request.transport.abort()
        return answer


def unavailable(message: str) -> web.Response:
    """Return 503 in OpenAI's error format: another server may answer, or this one later."""
    error = {"message": message, "type": SERVER_NOT_READY, "param": None, "code": 503}
    return web.json_response({"error": error}, status=503, headers={"Retry-After": str(RETRY_SECONDS)})


def _at(engine_url: str, request: web.Request) -> URL:
    """Return the engine's URL with the request's path and query, unchanged."""
    asked = request.rel_url
    query = f"?{asked.raw_query_string}" if asked.raw_query_string else ""
    return URL(f"{engine_url}{asked.raw_path}{query}", encoded=True)


def _without(headers: CIMultiDictProxy[str], left_out: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out | named)
