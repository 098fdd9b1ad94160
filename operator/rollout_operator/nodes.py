"""Labels nodes that lack user namespaces (rollout_api/on_cluster/nodes.py), for the scheduling of sandbox pods."""

from rollout_api.on_cluster.nodes import LABEL_PREFIX, is_ready, labels_of, reported_handlers, user_namespaces_label
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.actions import Patch, Plan, Ref

LACKS_USER_NAMESPACES = "false"
"""Label value that the operator sets and removes. It keeps any other value, which an administrator has set."""


def plan(node: Manifest) -> Plan:
    """Label a node with the runtime handlers without user namespaces, as its kubelet reports them."""
    if not is_ready(node):  # A starting kubelet has not reported its runtime yet.
        return Plan()
    _, lacking = reported_handlers(node)
    wanted = {user_namespaces_label(handler) for handler in lacking}
    found = {key: value for key, value in labels_of(node).items() if key.startswith(LABEL_PREFIX)}
    change: dict[str, str | None] = {key: LACKS_USER_NAMESPACES for key in sorted(wanted) if key not in found}
    change |= {key: None for key, value in found.items() if key not in wanted and value == LACKS_USER_NAMESPACES}
    if not change:
        return Plan()
    return Plan((Patch(Ref.of("Node", node), {"metadata": {"labels": change}}),))
