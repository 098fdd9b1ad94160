"""Which objects a change affects: no change that matters to a RolloutJob or Sandbox is missed, and heartbeats wake
none.
"""

from typing import Any

import pytest

from rollout_api.cluster import JOB_LABEL, MODEL_SERVER_LABEL, ROLE_LABEL
from rollout_operator.actions import Ref
from rollout_operator.cache import Cache, affected_by


def obj(name: str, owner: tuple[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    """Return an object, with its controller as (kind, name)."""
    references = [{"kind": owner[0], "name": owner[1], "uid": "u", "controller": True}] if owner else []
    return {
        "metadata": {"namespace": "n", "name": name, "uid": name, "ownerReferences": references, **metadata},
        "spec": {},
    }


def node(ready: str | None) -> dict[str, Any]:
    """Return a node with that status of its condition Ready."""
    conditions = [{"type": "Ready", "status": ready, "reason": "KubeletReady"}] if ready else []
    return {"metadata": {"name": "node-1", "uid": "node-1"}, "spec": {}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("kind", "changed", "woken"),
    [
        ("Sandbox", obj("s"), Ref("Sandbox", "n", "s")),
        ("RolloutJob", obj("j"), Ref("RolloutJob", "n", "j")),
        ("Pod", obj("p", ("Sandbox", "s")), Ref("Sandbox", "n", "s")),
        ("Job", obj("j-runner", ("RolloutJob", "j")), Ref("RolloutJob", "n", "j")),
        ("NetworkPolicy", obj("j-net-1", ("RolloutJob", "j")), Ref("RolloutJob", "n", "j")),
        (
            "Pod",
            obj("j-runner-0", ("Job", "j-runner"), labels={ROLE_LABEL: "runner", JOB_LABEL: "j"}),
            Ref("RolloutJob", "n", "j"),
        ),
        ("RolloutShard", obj("j-0", ("RolloutJob", "j")), Ref("RolloutJob", "n", "j")),
        ("ModelServer", obj("m"), Ref("ModelServer", "n", "m")),
        ("StatefulSet", obj("m", ("ModelServer", "m")), Ref("ModelServer", "n", "m")),
        ("Job", obj("m-download", ("ModelServer", "m")), Ref("ModelServer", "n", "m")),
        ("Pod", obj("m-0", ("StatefulSet", "m"), labels={MODEL_SERVER_LABEL: "m"}), Ref("ModelServer", "n", "m")),
    ],
)
def test_change_wakes_its_objects_also_after_a_deletion(kind: str, changed: dict[str, Any], woken: Ref) -> None:
    assert affected_by(kind, None, changed, Cache()) == [woken]
    assert affected_by(kind, changed, None, Cache()) == [woken]


@pytest.mark.parametrize(("model", "server"), [({"serverRef": "shared"}, "shared"), ({"server": {}}, "j-model")])
def test_a_job_and_its_model_server_wake_each_other(model: dict[str, Any], server: str) -> None:
    model = {key: value or {"replicas": 1} for key, value in model.items()}
    job, other = obj("j") | {"spec": {"model": model}}, obj("other") | {"spec": {"model": {"serverRef": "another"}}}
    cache = Cache()
    for each in (job, other):
        cache.put("RolloutJob", each)
    assert affected_by("RolloutJob", None, job, cache) == [Ref("RolloutJob", "n", "j"), Ref("ModelServer", "n", server)]
    assert affected_by("ModelServer", None, obj(server), cache) == [
        Ref("ModelServer", "n", server),
        Ref("RolloutJob", "n", "j"),
    ]


def test_deleted_network_policy_of_a_job_wakes_its_sandboxes() -> None:
    cache = Cache()
    cache.put("Sandbox", obj("s", ("RolloutJob", "j")))
    cache.put("Sandbox", obj("by-hand"))
    policy = obj("j-net-1", ("RolloutJob", "j"))
    assert affected_by("NetworkPolicy", None, policy, cache) == [Ref("RolloutJob", "n", "j")]
    assert affected_by("NetworkPolicy", policy, None, cache) == [Ref("RolloutJob", "n", "j"), Ref("Sandbox", "n", "s")]


def test_an_acknowledgement_of_a_runner_wakes_the_model_server_of_its_job() -> None:
    cache = Cache()
    cache.put("RolloutJob", obj("j") | {"spec": {"model": {"serverRef": "shared"}}})
    shard = obj("j-0", ("RolloutJob", "j"))
    assert affected_by("RolloutShard", shard, shard, cache) == [
        Ref("RolloutJob", "n", "j"),
        Ref("ModelServer", "n", "shared"),
    ]


def test_pods_of_unknown_owners_wake_no_object() -> None:
    assert affected_by("Pod", None, obj("p", ("ReplicaSet", "r")), Cache()) == []
    assert affected_by("Pod", None, obj("p"), Cache()) == []


@pytest.mark.parametrize(
    ("before", "after", "concerns"),
    [("True", "True", False), ("True", "Unknown", True), ("Unknown", "True", True), ("True", None, True)],
)
def test_a_node_wakes_its_sandboxes_when_its_readiness_changes_only(
    before: str, after: str | None, concerns: bool
) -> None:
    cache = Cache()
    cache.put("Pod", {**obj("p", ("Sandbox", "s")), "spec": {"nodeName": "node-1"}})
    cache.put("Pod", {**obj("q", ("Sandbox", "other")), "spec": {"nodeName": "node-2"}})
    woken = affected_by("Node", node(before), node(after) if after else None, cache)
    assert woken == [Ref("Node", "", "node-1"), *([Ref("Sandbox", "n", "s")] if concerns else [])]
