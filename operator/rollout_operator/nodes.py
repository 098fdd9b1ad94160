"""Labels nodes by what they offer to sandboxes (rollout_api/on_cluster/nodes.py): the scheduler places pods by them."""

from rollout_api.on_cluster.nodes import LABEL_PREFIX, is_ready, labels_of, reported_handlers, user_namespaces_label
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.actions import Patch, Plan, Ref

LACKS_USER_NAMESPACES = "false"
"""The value that the operator sets and removes. An administrator may set any other value, which the operator keeps."""


def plan(node: Manifest) -> Plan:
    """Label a node with the runtime handlers without user namespaces, as its kubelet reports them."""
    if not is_ready(node):  # A kubelet that starts reports its runtime late.
        return Plan()
    _, lacking = reported_handlers(node)
    wanted = {user_namespaces_label(handler) for handler in lacking}
    found = {key: value for key, value in labels_of(node).items() if key.startswith(LABEL_PREFIX)}
    change: dict[str, str | None] = {key: LACKS_USER_NAMESPACES for key in sorted(wanted) if key not in found}
    change |= {key: None for key, value in found.items() if key not in wanted and value == LACKS_USER_NAMESPACES}
    if not change:
        return Plan()
    return Plan((Patch(Ref("Node", "", node["metadata"]["name"]), {"metadata": {"labels": change}}),))
