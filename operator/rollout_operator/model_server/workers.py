"""`GET /v1/rl/workers`: the servers of ModelServers in the format of Dynamo's worker discovery.

The format is protocol version 1 of ai-dynamo/dynamo (lib/rl/src/lib.rs: RlWorkersResponse and RlWorkerInfo), so that
trainers for Dynamo can use ModelServers. The list grants no access: control routes need the ModelServer's token.
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
