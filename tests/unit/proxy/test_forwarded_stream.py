"""Whether a client that closed its connection had all of a forwarded stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_runtime.proxy.peers import _ForwardedStream, _Peer


@contextlib.asynccontextmanager
async def forwarded(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[_ForwardedStream]:
    """Yield the stream of an owner that answers so."""
    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        response = await client.get(server.make_url("/"))
        yield _ForwardedStream(_Peer("owner"), response)
        response.close()


@pytest.mark.parametrize(("after", "is_whole"), [([], True), ([b"data: [DONE]\n\n"], False)])
async def test_a_client_that_leaves_with_the_last_event_has_the_whole_stream(
    after: list[bytes], *, is_whole: bool
) -> None:
    left = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: last\n\n")
        await left.wait()
        for piece in after:
            await response.write(piece)
        await response.write_eof()
        return response

    async with forwarded(answer) as stream:
        pieces = stream.pieces()
        assert await anext(pieces) == b"data: last\n\n"
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        left.set()
        assert await stream.was_passed_on() is is_whole


async def test_a_piece_that_was_not_written_is_missing() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"data: last\n\n")

    async with forwarded(answer) as stream:
        pieces = stream.pieces()
        await anext(pieces)
        await pieces.aclose()  # the client left while the piece was sent
        assert not await stream.was_passed_on()
