"""The cache: its indexes always agree with its objects."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_operator.cache import Cache

NAMES = st.sampled_from("abc")
OWNERS = st.sampled_from((None, "owner-1", "owner-2"))
NODES = st.sampled_from((None, "node-1", "node-2"))


def pod(name: str, owner: str | None = None, node: str | None = None) -> dict[str, Any]:
    """Return a pod as the cache keeps it."""
    references = [{"kind": "Sandbox", "name": "x", "uid": owner, "controller": True}] if owner else []
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"namespace": "n", "name": name, "uid": name, "ownerReferences": references}, "spec": spec}


class Pods(RuleBasedStateMachine):
    """Pods are added, change owner and node, and are deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()
        self.model: dict[str, dict[str, Any]] = {}

    @rule(name=NAMES, owner=OWNERS, node=NODES)
    def put(self, name: str, owner: str | None, node: str | None) -> None:
        self.model[name] = pod(name, owner, node)
        self.cache.put("Pod", self.model[name])

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.model.pop(name, None)
        self.cache.remove("Pod", "n", name)

    @invariant()
    def indexes_agree(self) -> None:
        for owner in ("owner-1", "owner-2"):
            expected = [
                p for p in self.model.values() if any(r["uid"] == owner for r in p["metadata"]["ownerReferences"])
            ]
            assert _names(self.cache.owned("Pod", "n", owner)) == _names(expected)
        for node in ("node-1", "node-2"):
            expected = [p for p in self.model.values() if p["spec"].get("nodeName") == node]
            assert _names(self.cache.pods_on(node)) == _names(expected)
        assert _names(self.cache.all("Pod")) == sorted(self.model)

    def teardown(self) -> None:
        """Check that an emptied cache holds nothing: indexes do not leak."""
        for name in tuple(self.model):
            self.remove(name)
        assert not self.cache._owned
        assert not self.cache._pods_by_node


def _names(objects: Any) -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in objects)


TestPods = Pods.TestCase


def test_owner_that_is_not_a_controller_does_not_count() -> None:
    cache = Cache()
    obj = pod("a")
    obj["metadata"]["ownerReferences"] = [{"kind": "RolloutJob", "name": "x", "uid": "owner-1"}]
    cache.put("Pod", obj)
    assert cache.owned("Pod", "n", "owner-1") == ()


def test_an_object_of_another_namespace_is_never_owned() -> None:
    cache = Cache()
    forged = pod("a", "owner-1")
    forged["metadata"]["namespace"] = "elsewhere"
    cache.put("Pod", forged)
    assert cache.owned("Pod", "n", "owner-1") == ()
    cache.remove("Pod", "elsewhere", "a")
    assert not cache._owned
