"""The operator's HTTP endpoints: metrics, readiness, and discovery of model servers.

`GET /v1/rl/workers` lists the servers of ModelServers in the format of Dynamo's worker discovery: protocol version 1 of
ai-dynamo/dynamo (lib/rl/src/lib.rs: RlWorkersResponse and RlWorkerInfo), so that trainers for Dynamo can use them. The
list grants no access: control routes need the ModelServer's token.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from yarl import URL

from rollout_api.cluster import MODEL_CONTROL_PORT
from rollout_api.listener import page_of
from rollout_api.model_server import ModelServer, ServerState, ServerStatus
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.cache import read_as, uid_of

PROTOCOL_VERSION: Final = 1
ENDPOINT: Final = "rl"
"""Dynamo's name of the endpoint with the control routes."""
ROUTES: Final = (
    *("abort_requests", "finish_weight_update", "init_weight_transfer_engine", "is_paused", "pause", "policy/fetch"),
    *("resume", "start_weight_update", "update_weight_version", "update_weights", "weight_checker", "weight_info"),
)
"""Routes of a server's control port, in Dynamo's order."""
INSTANCE_BITS: Final = 53
"""Bits of an instance id. Dynamo's have 64, but many JSON readers are exact only up to 53."""


def workers(servers: Iterable[Manifest], namespace: str | None = None) -> dict[str, Any]:
    """Return the response body for the ModelServers in one namespace or in all."""
    found = [
        _worker(server, entry)
        # A malformed ModelServer has the condition Invalid and no servers.
        for server in (read_as(ModelServer, found) for found in servers)
        if server is not None and server.status is not None and namespace in (None, server.metadata.namespace)
        for entry in server.status.servers
        if entry.url
    ]
    found.sort(key=lambda worker: (worker["namespace"], worker["component"], worker["instance_id"]))
    # The protocol requires a namespace even if the list is of all namespaces.
    return {"protocol_version": PROTOCOL_VERSION, "namespace": namespace or "*", "workers": found}


def _worker(server: ModelServer, entry: ServerStatus) -> dict[str, Any]:
    namespace, component = server.metadata.namespace, server.metadata.name
    control = str(URL(entry.url).with_port(MODEL_CONTROL_PORT))
    worker = {
        "namespace": namespace,
        "component": component,
        "endpoint": ENDPOINT,
        "instance_id": instance_id(entry.uid),
        "transport": {"http": entry.url},
        "request_plane_url": entry.url,
        "system_url": control,
        "admin_base_url": control,
        "model": server.spec.model.name,
        "routes": list(ROUTES),
        "world_size": server.spec.parallelism.accelerators,
    }
    if not entry.ready:
        worker["error"] = _NOT_READY[entry.state]
    return worker


_NOT_READY: Final = {
    ServerState.STARTING: "the server is starting",
    ServerState.PENDING_WEIGHTS: "the server was not verified to have the current policy yet",
    ServerState.READY: "the server is not ready",
    ServerState.EVICTED: "the server failed and is being replaced",
}
"""Error messages for servers that are not ready."""


def instance_id(uid: str) -> int:
    """Return an integer that identifies a pod."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8]) >> (64 - INSTANCE_BITS)


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

    page = page_of(lambda: generate_latest(registry))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=page(), content_type="text/plain", charset="utf-8")

    async def ready(_: web.Request) -> web.Response:
        waiting = unsynced()
        return web.Response(status=503 if waiting else 200, text=f"waiting for {waiting}\n" if waiting else "ok\n")

    async def discovery(request: web.Request) -> web.Response:
        """Return only the servers of the ModelServer whose token was sent: tenants share this port."""
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            words = "send the field `token` of a ModelServer's control Secret as a bearer token\n"
            return web.Response(status=401, text=words, headers={"WWW-Authenticate": "Bearer"})
        proof = shown.strip().encode(errors="surrogateescape")
        known = ((server, tokens.get(uid_of(server))) for server in model_servers())
        own = [server for server, token in known if token and hmac.compare_digest(token.encode(), proof)]
        if not own:
            words = "no ModelServer has this token, or this replica is on standby; try another replica\n"
            return web.Response(status=403, text=words)
        return web.json_response(workers(own, request.query.get("namespace")))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", ready), web.get("/v1/rl/workers", discovery)])
    return app
