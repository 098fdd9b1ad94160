"""`/metrics` and `/healthz` of a runner pod."""

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST


@contextlib.asynccontextmanager
async def serve_metrics(exposition: Callable[[], bytes], port: int) -> AsyncIterator[None]:
    """Serve them on all addresses. That `/healthz` answers says that the event loop, which all rollouts share, turns."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
