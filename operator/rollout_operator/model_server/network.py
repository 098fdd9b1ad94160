"""Who reaches the pods of a ModelServer. Sandboxes never do, whatever is asked for: they run code that nobody has read."""

from collections.abc import Iterator
from typing import Any, Final

from rollout_api.cluster import (
    MODEL_CONTROL_PORT,
    MODEL_DOWNLOAD_ROLE,
    MODEL_PORT,
    MODEL_SERVER_LABEL,
    ROLE_LABEL,
    RUNNER_ROLE,
    SANDBOX_ROLE,
)
from rollout_api.model_server import ModelServer
from rollout_api.selectors import NetworkPeer
from rollout_operator.config import OperatorConfig
from rollout_operator.model_server.owned import download_name, metadata, selector, with_digest

OPERATOR: Final = {"app.kubernetes.io/name": "agent-rollouts", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods, as the chart sets them."""

FIRST_PORT, LAST_PORT = 1024, 65_535
"""Ports that NCCL may choose for the engine's end of a connection."""

Json = dict[str, Any]


def policies(server: ModelServer, config: OperatorConfig) -> list[Json]:
    """Of the servers, and of the download's pod, which nobody calls.

    What they may reach is open: stores, hubs and trainers are anywhere.
    """
    name = server.metadata.name
    return [
        _policy(server, name, {"matchLabels": {MODEL_SERVER_LABEL: name}}, list(_ingress(server, config))),
        _policy(server, download_name(name), {"matchLabels": selector(server, MODEL_DOWNLOAD_ROLE)}, []),
    ]


def _ingress(server: ModelServer, config: OperatorConfig) -> Iterator[Json]:
    spec = server.spec
    runners = {"podSelector": {"matchLabels": {ROLE_LABEL: RUNNER_ROLE}}}
    yield {"from": [runners, *map(_without_sandboxes, spec.clients)], "ports": [_tcp(MODEL_PORT)]}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": config.lease.namespace}},
        "podSelector": {"matchLabels": OPERATOR},
    }
    yield {"from": [operator], "ports": [_tcp(MODEL_CONTROL_PORT)]}
    if spec.weight_transfer.push and spec.weight_transfer.push.peers is not None:
        trainer = _without_sandboxes(NetworkPeer(pod_selector=spec.weight_transfer.push.peers))
        yield {"from": [trainer], "ports": _tensor_ports(spec.weight_transfer.push.ports)}
    if spec.parallelism.nodes > 1:
        own = {"podSelector": {"matchLabels": {MODEL_SERVER_LABEL: server.metadata.name}}}
        yield {"from": [own], "ports": _tensor_ports([])}


def _tensor_ports(ports: list[int]) -> list[Json]:
    """These, or all that an engine may open; never the data and control ports."""
    if ports:
        return [_tcp(port) for port in ports]
    return [
        {"protocol": "TCP", "port": FIRST_PORT, "endPort": MODEL_PORT - 1},
        {"protocol": "TCP", "port": MODEL_CONTROL_PORT + 1, "endPort": LAST_PORT},
    ]


def _without_sandboxes(peer: NetworkPeer) -> Json:
    """The peer without pods that are sandboxes; a peer without a pod selector means all pods of its namespaces."""
    pods = peer.pod_selector.wire() if peer.pod_selector else {}
    not_sandbox = {"key": ROLE_LABEL, "operator": "NotIn", "values": [SANDBOX_ROLE]}
    pods["matchExpressions"] = [*pods.get("matchExpressions", ()), not_sandbox]
    namespaces = {"namespaceSelector": peer.namespace_selector.wire()} if peer.namespace_selector else {}
    return {**namespaces, "podSelector": pods}


def _policy(server: ModelServer, name: str, pods: Json, ingress: list[Json]) -> Json:
    return with_digest(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(server, name),
            "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
        }
    )


def _tcp(port: int) -> Json:
    return {"protocol": "TCP", "port": port}
