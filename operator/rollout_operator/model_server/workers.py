"""`GET /v1/rl/workers`: all servers of all ModelServers, in the format of Dynamo's worker discovery.

Protocol version 1 of ai-dynamo/dynamo, lib/rl/src/lib.rs: RlWorkersResponse and RlWorkerInfo. Trainers that find their
engines there find ours. It says who is there and grants nothing: control routes want the token of their ModelServer.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final

from yarl import URL

from rollout_api.cluster import MODEL_CONTROL_PORT
from rollout_api.model_server import ModelServer, ServerState, ServerStatus
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.cache import read_as

PROTOCOL_VERSION: Final = 1
ENDPOINT: Final = "rl"
"""Dynamo's name of the endpoint with the control routes."""
ROUTES: Final = (
    *("abort_requests", "finish_weight_update", "init_weight_transfer_engine", "is_paused", "pause", "policy/fetch"),
    *("resume", "start_weight_update", "update_weight_version", "update_weights", "weight_checker", "weight_info"),
)
"""Routes of a server's control port, in Dynamo's order."""
INSTANCE_BITS: Final = 53
"""Bits of an instance id. Dynamo's have 64, but JSON readers keep only 53 exactly."""


def workers(servers: Iterable[Manifest], namespace: str | None = None) -> dict[str, Any]:
    """Return the response body for the ModelServers in one namespace or in all."""
    found = [
        _worker(server, entry)
        # One that cannot be read has the condition Invalid, and nothing runs because of it.
        for server in (read_as(ModelServer, found) for found in servers)
        if server is not None and server.status is not None and namespace in (None, server.metadata.namespace)
        for entry in server.status.servers
        if entry.url
    ]
    found.sort(key=lambda worker: (worker["namespace"], worker["component"], worker["instance_id"]))
    # The protocol wants a name there, also of all namespaces.
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
        worker["error"] = _WHY[entry.state]
    return worker


_WHY: Final = {
    ServerState.STARTING: "it is starting",
    ServerState.PENDING_WEIGHTS: "it has not been verified to have the current policy",
    ServerState.READY: "it is not ready",
    ServerState.EVICTED: "it failed, and is being replaced",
}


def instance_id(uid: str) -> int:
    """Return an integer that identifies a pod."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8]) >> (64 - INSTANCE_BITS)
