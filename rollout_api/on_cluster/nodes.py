"""Node features that sandboxes need: user namespaces and image volumes, per node and counted over all nodes.

The kubelet reports in `status.runtimeHandlers` whether a runtime handler supports user namespaces. Kubernetes sets no node
label for it, so the operator sets one for the scheduler. Only the kubelet's report counts, because a sandbox's report
comes from untrusted code.
"""

import re
from collections.abc import Mapping
from typing import Any

from rollout_api.base import API_GROUP
from rollout_api.conditions import true_conditions
from rollout_api.on_cluster.objects import Manifest

LABEL_PREFIX = f"userns.{API_GROUP}/"
_HANDLER = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Form of the handler names that a RuntimeClass can refer to. Such a name is also valid in a label."""

# The first versions with image volumes (their release notes). Any other runtime is assumed to be new enough; where it is
# not, the pod is refused or cannot start, and the reason is in the Sandbox's conditions.
IMAGE_VOLUMES_SINCE = {"containerd": (2, 1), "cri-o": (1, 31)}
WITHOUT_IMAGE_VOLUMES = frozenset({"docker"})


def user_namespaces_label(handler: str) -> str:
    """Return the label key of nodes that give pods of a runtime handler no user namespace. Empty: the default handler."""
    return f"{LABEL_PREFIX}{handler or 'default'}"


def has_user_namespaces(node: Manifest, handler: str) -> bool:
    """Whether pods of a runtime handler can have a user namespace on a node. True while it is not known yet."""
    return _is_starting(node) or (
        handler in reported_handlers(node)[0] and user_namespaces_label(handler) not in labels_of(node)
    )


def is_ready(node: Manifest) -> bool:
    """Whether the node's condition Ready is True."""
    return "Ready" in true_conditions(node["status"])


def runtime(node: Manifest) -> str:
    """Return name and version of a node's container runtime, as in `containerd://2.1.0`; empty if not reported."""
    version: str = node["status"].get("nodeInfo", {}).get("containerRuntimeVersion", "")
    return version


def has_image_volumes(node: Manifest) -> bool:
    """Whether a node's container runtime can mount images, judged by its version."""
    name, _, version = runtime(node).partition("://")
    since = IMAGE_VOLUMES_SINCE.get(name)
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if since is None or numbers is None:
        return name not in WITHOUT_IMAGE_VOLUMES
    return (int(numbers[1]), int(numbers[2])) >= since


class NodeCounts:
    """Counts of nodes by feature, updated with each change of a node, so that a plan need not read all nodes."""

    def __init__(self) -> None:
        self.total = 0
        self.ready = 0
        self.without_image_volumes = 0
        self._starting = 0
        self._able: dict[str, int] = {}

    def with_user_namespaces(self, handler: str) -> int:
        """Return the number of nodes where pods of a runtime handler can have user namespaces, or may have them."""
        return self._able.get(handler, 0) + self._starting

    def add(self, node: Manifest) -> None:
        self._count(node, 1)

    def remove(self, node: Manifest) -> None:
        self._count(node, -1)

    def _count(self, node: Manifest, step: int) -> None:
        self.total += step
        self.ready += step * is_ready(node)
        self.without_image_volumes += step * (not has_image_volumes(node))
        if _is_starting(node):
            self._starting += step
            return
        for handler in reported_handlers(node)[0]:
            self._able[handler] = self._able.get(handler, 0) + step * has_user_namespaces(node, handler)


def reported_handlers(node: Manifest) -> tuple[set[str], set[str]]:
    """Return the names of the runtime handlers with user namespaces, and of those without.

    A runtime that is too old to report its handlers counts as without.
    """
    handlers = {
        handler.get("name", ""): bool((handler.get("features") or {}).get("userNamespaces"))
        for handler in node["status"].get("runtimeHandlers") or ()
    }
    usable = {"": False} | {name: has for name, has in handlers.items() if not name or _HANDLER.fullmatch(name)}
    return {name for name, has in usable.items() if has}, {name for name, has in usable.items() if not has}


def _is_starting(node: Manifest) -> bool:
    """Whether the kubelet has not reported its runtime yet, as just after its start."""
    is_known = bool(node["status"].get("runtimeHandlers")) or any(
        key.startswith(LABEL_PREFIX) for key in labels_of(node)
    )
    return not is_known and not is_ready(node)


def labels_of(node: Manifest) -> Mapping[str, Any]:
    labels: Mapping[str, Any] = node["metadata"].get("labels") or {}
    return labels
