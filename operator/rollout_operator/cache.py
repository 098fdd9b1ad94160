"""What the watches have told so far: plain dicts, one index (who controls what), no copies.

Objects are JSON as the API server sent it, without the fields that nobody reads (`prune.py`). Whoever reads them must not
change them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rollout_operator.actions import Manifest
from rollout_operator.nodes import NodeCounts

NodeName = str
_Name = tuple[str, str]  # namespace, name
_K = TypeVar("_K")


def uid_of(obj: Manifest) -> str:
    """The object's uid."""
    uid: str = obj["metadata"]["uid"]
    return uid


def controller_of(obj: Manifest) -> Mapping[str, Any] | None:
    """The owner reference of the object's controller."""
    for reference in obj["metadata"].get("ownerReferences", ()):
        if reference.get("controller"):
            found: Mapping[str, Any] = reference
            return found
    return None


class Cache:
    """Objects by kind and name, and by the uid of their controller."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[_Name, Manifest]] = {}
        self._owned: dict[tuple[str, str, str], dict[_Name, Manifest]] = {}
        self._pods_by_node: dict[NodeName, dict[_Name, Manifest]] = {}
        self.nodes = NodeCounts()

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object; None when there is none, or none was seen yet."""
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: str) -> Iterable[Manifest]:
        """All objects of a kind."""
        return self._objects.get(kind, {}).values()

    def owned(self, kind: str, namespace: str, owner_uid: str) -> tuple[Manifest, ...]:
        """Objects of a kind whose controller has that uid: the Pods of a Sandbox or of a Job, the Sandboxes, the Job
        and the NetworkPolicies of a RolloutJob. An owner is in the namespace of what it owns; anybody can write its uid
        into an object elsewhere."""
        return tuple(self._owned.get((kind, namespace, owner_uid), {}).values())

    def pods_on(self, node: NodeName) -> tuple[Manifest, ...]:
        """Pods that were placed on a node."""
        return tuple(self._pods_by_node.get(node, {}).values())

    def put(self, kind: str, obj: Manifest) -> None:
        """Note an object as it is now."""
        metadata = obj["metadata"]
        name = (metadata.get("namespace", ""), metadata["name"])
        self.remove(kind, *name)
        self._objects.setdefault(kind, {})[name] = obj
        if owner := controller_of(obj):
            self._owned.setdefault((kind, name[0], owner["uid"]), {})[name] = obj
        if kind == "Pod" and (node := obj["spec"].get("nodeName")):
            self._pods_by_node.setdefault(node, {})[name] = obj
        if kind == "Node":
            self.nodes.add(obj)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Forget an object; one that is not there is fine."""
        key = (namespace, name)
        old = self._objects.get(kind, {}).pop(key, None)
        if old is None:
            return
        if owner := controller_of(old):
            _drop(self._owned, (kind, namespace, owner["uid"]), key)
        if kind == "Pod" and (node := old["spec"].get("nodeName")):
            _drop(self._pods_by_node, node, key)
        if kind == "Node":
            self.nodes.remove(old)


def _drop(index: dict[_K, dict[_Name, Manifest]], entry: _K, name: _Name) -> None:
    members = index[entry]
    del members[name]
    if not members:
        del index[entry]
