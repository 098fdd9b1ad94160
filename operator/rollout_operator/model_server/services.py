"""Addresses of the servers, and their protection from drains of nodes."""

from typing import Any, Final

from rollout_api.cluster import MODEL_PORT, MODEL_SERVER_LABEL, MODEL_SERVER_ROLE, MODEL_WORKER_ROLE, ROLE_LABEL
from rollout_api.model_server import ModelServer
from rollout_operator.model_server.owned import api_name, metadata, selector, with_digest

_SERVING: Final = [MODEL_SERVER_ROLE, MODEL_WORKER_ROLE]

Json = dict[str, Any]


def url(server: ModelServer) -> str:
    """Of the Service in front of all servers."""
    return f"http://{api_name(server.metadata.name)}.{server.metadata.namespace}.svc:{MODEL_PORT}"


def services(server: ModelServer) -> list[Json]:
    """The Service in front of all ready servers, and the headless one by which each has a name.

    A LeaderWorkerSet makes its headless Service itself.
    """
    name = server.metadata.name
    front = _service(server, api_name(name), {})
    # Also of pods that are not ready: an engine that starts is known by name to what starts beside it.
    headless = _service(server, name, {"clusterIP": "None", "publishNotReadyAddresses": True})
    return [front] if server.spec.parallelism.nodes > 1 else [headless, front]


def disruption_budget(server: ModelServer) -> Json | None:
    """The PodDisruptionBudget, where one is asked for."""
    budget = server.spec.pod_disruption_budget
    if budget is None:
        return None
    return with_digest(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(server, server.metadata.name),
            "spec": {
                "maxUnavailable": budget.max_unavailable,
                "selector": {
                    "matchLabels": {MODEL_SERVER_LABEL: server.metadata.name},
                    # Of a server on several nodes all pods count: each one takes the others with it.
                    "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": _SERVING}],
                },
                # A server that never came up must not keep a node from being drained.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )


def _service(server: ModelServer, name: str, more: Json) -> Json:
    return with_digest(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(server, name),
            "spec": {
                **more,
                "selector": selector(server),
                "ports": [{"name": "model", "port": MODEL_PORT, "targetPort": MODEL_PORT, "protocol": "TCP"}],
            },
        }
    )
