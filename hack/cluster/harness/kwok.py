"""Simulated nodes for tests of scale: kwok simulates their kubelets, and their pods are only API objects."""

from pathlib import Path
from typing import Any

from . import build, cluster, components, configs, nodes
from .cluster import Say
from .layout import Layout

SELECTOR = "type=kwok"
TAINT = "kwok.x-k8s.io/node"


def fake_node(index: int) -> dict[str, Any]:
    """Returns a node on which only pods with the toleration are scheduled; like the real nodes, it reports user
    namespaces.
    """
    name = f"kwok-{index}"
    resources = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": str(configs.MAX_PODS)}
    features = {"recursiveReadOnlyMounts": True, "userNamespaces": True}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"type": "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        },
        "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "runtimeHandlers": [{"name": handler, "features": features} for handler in ("", "runc")],
        },
    }


def stages(folder: Path) -> str:
    """Returns kwok's configuration: nodes are ready, and pods start and end, immediately."""
    return "\n---\n".join(file.read_text() for file in sorted(folder.glob("*.yaml")))


def up(name: str, count: int, say: Say) -> None:
    """Adds simulated nodes up to a number, and starts kwok. Raises ClusterError and NodeError."""
    layout = cluster.existing(name).layout
    (layout.state / "config" / "kwok-stages.yaml").write_text(stages(build.share_folder() / "kwok"))
    nodes.start(layout.node(0), components.kwok(layout, build.programs_folder()))
    api = cluster.admin(layout)
    for index in range(count):
        api.request_unless(409, "POST", "/api/v1/nodes", fake_node(index))
    cluster.wait("the simulated nodes", lambda: _ready(layout) >= count, nodes.log_file(layout.node(0), "kwok"))
    say(f"{count} simulated nodes, for pods with a toleration of {TAINT}:NoSchedule and nodeSelector {SELECTOR}")


def down(name: str, say: Say) -> None:
    """Removes all simulated nodes with their pods, and stops kwok. Raises ClusterError."""
    layout = cluster.existing(name).layout
    api = cluster.admin(layout)
    query = f"labelSelector={SELECTOR}"
    names = [item["metadata"]["name"] for item in api.request("GET", f"/api/v1/nodes?{query}")["items"]]
    for node in names:
        for pod in api.request("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]:
            metadata = pod["metadata"]
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            api.request_unless(404, "DELETE", path, {"gracePeriodSeconds": 0})
    if names:
        api.request("DELETE", f"/api/v1/nodes?{query}", seconds=60)
    nodes.forget(layout.node(0), "kwok")
    say(f"{len(names)} simulated nodes were removed")


def _ready(layout: Layout) -> int:
    items = cluster.admin(layout).request("GET", f"/api/v1/nodes?labelSelector={SELECTOR}", seconds=60)["items"]
    conditions = [condition for item in items for condition in item["status"].get("conditions", [])]
    return sum(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
