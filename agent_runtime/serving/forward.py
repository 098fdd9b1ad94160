"""One request passed on to the engine as it came, and the answer back as it comes: no byte waits for another.

Whoever goes away takes the request with them: the engine sees its client go, and stops to generate.
"""

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
"""Unused connections are closed before the engine closes them itself (uvicorn: after 5 s), which could meet a request."""
RETRY_SECONDS: Final = 5
"""After which a client may ask again: an engine that has its policy is told so within seconds."""
MOST_LINE: Final = 64 * 1024
"""Bytes of a header line from the engine."""

HOP_BY_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    )
)
"""Headers of one connection (RFC 9110, 7.6.1)."""
OURS: Final = HOP_BY_HOP | {"host", "authorization", ENGINE_PROCESS_HEADER.lower()}
"""Headers of a request that stay here: the engine knows no keys, and need not see any."""


def engine_session() -> aiohttp.ClientSession:
    """Connections to the engine: as many as there are requests, without a time limit, nothing decoded."""
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
) -> web.StreamResponse:
    """Pass one request on, and its answer back, with further `headers`.

    `refusal` is asked before the request is sent, and when the answer begins, and replaces the engine's answer. From there
    on the connection tells that no other process answers.
    """
    if (refused := refusal()) is not None:
        return refused
    body = request.content if request.can_read_body else None
    try:
        upstream = await engine.request(
            request.method,
            _at(engine_url, request),
            headers=_kept(request.headers, OURS),
            data=body,
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
    except (aiohttp.ClientError, OSError) as error:
        return unavailable(f"the engine does not answer: {error}")
    async with upstream:
        if (refused := refusal()) is not None:
            return refused
        answer = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=_kept(upstream.headers, HOP_BY_HOP)
        )
        answer.headers.update(headers)
        await answer.prepare(request)
        try:
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            # An answer that is cut off must not look whole: without a proper end the client knows.
            log.warning("%s %s: cut off: %s", request.method, request.path, error)
            if request.transport is not None:
                request.transport.abort()
        return answer


def unavailable(message: str) -> web.Response:
    """503 in the form of OpenAI's errors: another server may answer, or this one later."""
    error = {"message": message, "type": SERVER_NOT_READY, "param": None, "code": 503}
    return web.json_response({"error": error}, status=503, headers={"Retry-After": str(RETRY_SECONDS)})


def _at(engine_url: str, request: web.Request) -> URL:
    """Path and query as they were sent; whatever host the request names, it goes to the engine."""
    asked = request.rel_url
    query = f"?{asked.raw_query_string}" if asked.raw_query_string else ""
    return URL(f"{engine_url}{asked.raw_path}{query}", encoded=True)


def _kept(headers: CIMultiDictProxy[str], left_out: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out | named)
