"""Which nodes a pod may come to: its selector, affinity and tolerations against what nodes say of themselves. Pure.

Not a scheduler: only enough to tell whether Overlay can be had on the nodes that the scheduler would choose from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_operator.actions import Manifest

HOSTNAME_LABEL = "kubernetes.io/hostname"


@dataclass(frozen=True)
class Node:
    """What matters of a node. `trial_failure` and `exec_failure`: what was learned of it, in the words of who said it."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    user_namespaces: frozenset[str] = frozenset()
    """Runtime handlers that can put a pod into a user namespace; the default one has the empty name."""
    runtime: str = ""
    """Name and version, as in `containerd://2.1.0`."""
    trial_failure: str | None = None
    exec_failure: str | None = None


def node_of(node: Manifest, trial_failure: str | None, exec_failure: str | None) -> Node:
    """What matters of a node's JSON."""
    status = node["status"]
    handlers = (h for h in status.get("runtimeHandlers") or () if h.get("features", {}).get("userNamespaces"))
    return Node(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels", {}),
        taints=node["spec"].get("taints") or (),
        user_namespaces=frozenset(handler.get("name", "") for handler in handlers),
        runtime=status.get("nodeInfo", {}).get("containerRuntimeVersion", ""),
        trial_failure=trial_failure,
        exec_failure=exec_failure,
    )


def candidates(spec: Mapping[str, Any], nodes: Sequence[Node]) -> list[Node]:
    """The nodes to which a pod with this spec may come, as far as labels and taints say."""
    selector: Mapping[str, str] = spec.get("nodeSelector") or {}
    affinity = _required_terms(spec)
    tolerations = spec.get("tolerations") or ()
    return [
        node
        for node in nodes
        if all(node.labels.get(key) == value for key, value in selector.items())
        and (not affinity or any(_matches(term, node) for term in affinity))
        and all(_tolerated(taint, tolerations) for taint in node.taints)
        and node.labels.get("kubernetes.io/os", "linux") == "linux"
    ]


def restricted_to(spec: dict[str, Any], nodes: Sequence[Node], others: Sequence[Node]) -> dict[str, Any]:
    """The spec with a required node affinity that holds for `nodes` and not for `others`, on top of its own.

    Named by host name, because no label says what is wanted; by the shorter of the two lists.
    """
    operator, named = ("In", nodes) if len(nodes) <= len(others) else ("NotIn", others)
    values = sorted(node.labels.get(HOSTNAME_LABEL, node.name) for node in named)
    wanted = {"key": HOSTNAME_LABEL, "operator": operator, "values": values}
    # The terms are alternatives, so each of them has to ask for it.
    own = [term for term in _required_terms(spec) if term] or [{}]
    terms = [{**term, "matchExpressions": [*(term.get("matchExpressions") or ()), wanted]} for term in own]
    affinity = spec.get("affinity") or {}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {**spec, "affinity": {**affinity, "nodeAffinity": {**(affinity.get("nodeAffinity") or {}), **required}}}


def _required_terms(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or ())


def _matches(term: Mapping[str, Any], node: Node) -> bool:
    fields = {"metadata.name": node.name}
    expressions, fields_wanted = term.get("matchExpressions") or (), term.get("matchFields") or ()
    return (
        bool(expressions or fields_wanted)
        and all(_holds(wanted, node.labels) for wanted in expressions)
        and all(_holds(wanted, fields) for wanted in fields_wanted)
    )


def _holds(wanted: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(wanted.get("key", ""))
    values: Sequence[Any] = wanted.get("values") or ()
    match wanted.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not value.isdigit() or len(values) != 1 or not str(values[0]).isdigit():
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
    return True  # the API server refuses any other operator


def _tolerated(taint: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    # Taints of a node's condition come and go; the scheduler waits for them.
    if taint.get("effect") == "PreferNoSchedule" or taint.get("key", "").startswith("node.kubernetes.io/"):
        return True
    return any(
        toleration.get("effect") in (None, "", taint.get("effect"))
        and toleration.get("key") in (None, "", taint.get("key"))
        and (toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (taint.get("value") or ""))
        for toleration in tolerations
    )
