"""Idle connections neither fill a server nor lock out other clients."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from rollout_api.listener import MOST_CONNECTIONS, MOST_OF_ADDRESS, limited_listener, page_of


@pytest.mark.parametrize(
    ("addresses", "each", "most"), [(1, 3 * MOST_OF_ADDRESS, MOST_OF_ADDRESS), (10, MOST_OF_ADDRESS, MOST_CONNECTIONS)]
)
async def test_idle_connections_are_limited_and_lock_out_nobody(addresses: int, each: int, most: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, limited_listener(0)).start()
        port = runner.addresses[0][1]
        for number in range(addresses):
            for _ in range(each):
                _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{number + 2}", 0))
                stack.callback(writer.close)
        assert runner.server is not None
        async with asyncio.timeout(10):
            while len(runner.server.connections) > most:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/") as reply:
            assert await reply.text() == "ok"
            # Its connection stays open for further requests.
        assert len(runner.server.connections) <= most + 1


def test_page_that_is_requested_again_and_again_is_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = 5.0, 0
    monkeypatch.setattr("rollout_api.listener.time", SimpleNamespace(monotonic=lambda: now))

    def make() -> bytes:
        nonlocal made
        made += 1
        return b"%d" % made

    page = page_of(make)
    assert [page(), page()] == [b"1", b"1"]
    now += 1
    assert [page(), page()] == [b"2", b"2"]
