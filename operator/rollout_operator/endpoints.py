"""What the operator answers over HTTP: its metrics, whether it is ready, and who serves models."""

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from rollout_operator.actions import Manifest
from rollout_operator.model_server.workers import workers


def application(
    registry: CollectorRegistry, unsynced: Callable[[], list[str]], model_servers: Callable[[], Iterable[Manifest]]
) -> web.Application:
    """The routes.

    Args:
        registry: of the metrics.
        unsynced: kinds whose objects are not all in the cache yet.
        model_servers: all ModelServers, as the API server has them.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    async def ready(_: web.Request) -> web.Response:
        waiting = unsynced()
        return web.Response(status=503 if waiting else 200, text=f"waiting for {waiting}\n" if waiting else "ok\n")

    async def discovery(request: web.Request) -> web.Response:
        return web.json_response(workers(model_servers(), request.query.get("namespace")))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", ready), web.get("/v1/rl/workers", discovery)])
    return app
