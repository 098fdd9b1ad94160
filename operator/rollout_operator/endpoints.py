"""The operator's HTTP endpoints: metrics, readiness, and discovery of model servers."""

import hmac
from collections.abc import Callable, Iterable, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from rollout_api.on_cluster.objects import Manifest
from rollout_operator.cache import uid_of
from rollout_operator.model_server.workers import workers


def application(
    registry: CollectorRegistry,
    unsynced: Callable[[], list[str]],
    model_servers: Callable[[], Iterable[Manifest]],
    tokens: Mapping[str, str],
) -> web.Application:
    """Build the web application.

    Args:
        unsynced: returns the kinds whose first list is not complete.
        model_servers: returns the cached ModelServers.
        tokens: tokens of the control ports, by uid of the ModelServer.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    async def ready(_: web.Request) -> web.Response:
        waiting = unsynced()
        return web.Response(status=503 if waiting else 200, text=f"waiting for {waiting}\n" if waiting else "ok\n")

    async def discovery(request: web.Request) -> web.Response:
        """Return only the servers of the ModelServer whose token was sent: tenants share this port."""
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            words = "send the field `token` of a ModelServer's control Secret as a bearer token\n"
            return web.Response(status=401, text=words, headers={"WWW-Authenticate": "Bearer"})
        proof = shown.strip().encode()
        known = ((server, tokens.get(uid_of(server))) for server in model_servers())
        own = [server for server, token in known if token and hmac.compare_digest(token.encode(), proof)]
        if not own:
            words = "no ModelServer has this token, or this replica is on standby; try another replica\n"
            return web.Response(status=403, text=words)
        return web.json_response(workers(own, request.query.get("namespace")))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", ready), web.get("/v1/rl/workers", discovery)])
    return app
