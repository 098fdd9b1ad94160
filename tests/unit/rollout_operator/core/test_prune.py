"""Pruning keeps what planners read, and drops what takes memory."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rollout_api.model_server import ModelServerStatus
from rollout_api.rollout_job import RolloutJobStatus, RunnerReport
from rollout_api.sandbox import SandboxStatus
from rollout_operator.prune import prune, readable_status

MODELS: dict[str, type[BaseModel]] = {
    "RolloutJob": RolloutJobStatus,
    "Sandbox": SandboxStatus,
    "ModelServer": ModelServerStatus,
    "RolloutShard": RunnerReport,
}
FIELDS = (
    "conditions",
    "index",
    "state",
    "outcomes",
    "restarts",
    "sealed",
    "policy",
    "servers",
    "places",
    "podIP",
    "unknown",
)
CONDITION = {"type": "Ready", "status": "True", "reason": "Up", "lastTransitionTime": "2026-01-01T00:00:00Z"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(CONDITION) | st.just({"index": 1}),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from((*FIELDS, *CONDITION, "index", "version")), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(status=JSON | st.dictionaries(st.sampled_from(FIELDS), JSON), kind=st.sampled_from(sorted(MODELS)))
def test_a_status_is_always_read_and_has_the_form_of_the_contract(status: Any, kind: str) -> None:
    found = readable_status(kind, status)
    if found:
        MODELS[kind].model_validate(found)


@pytest.mark.parametrize("kind", ["ModelServer", "RolloutJob", "Sandbox"])
def test_one_malformed_entry_of_a_status_hides_no_other(kind: str) -> None:
    late = CONDITION | {"type": "Failed", "lastTransitionTime": "tomorrow"}
    found = readable_status(kind, {"conditions": [None, CONDITION, late], "observedGeneration": 3, "unknown": 1})
    assert found == {"conditions": [CONDITION], "observedGeneration": 3}


def test_unknown_nested_fields_of_a_newer_operator_do_not_hide_other_fields() -> None:
    """Without its policy, a ModelServer would be at version 0, and all its servers would be replaced."""
    status: dict[str, Any] = {
        "policy": {"current": 7, "update": 12, "sources": [{"version": 7, "uri": "s3://b/7"}]},
        "servers": [{"name": "qwen-0", "url": "http://10.0.0.1:8000", "policyVersion": 7, "ready": True}],
        "adapters": {"solver": {"current": 3}},
        "conditions": [CONDITION],
    }
    newer = json.loads(json.dumps(status))
    for part in (
        newer,
        newer["policy"],
        newer["policy"]["sources"][0],
        newer["servers"][0],
        newer["adapters"]["solver"],
        newer["conditions"][0],
    ):
        part["later"] = {"a": [1]}
    assert readable_status("ModelServer", newer) == status


METADATA = {
    "name": "p",
    "namespace": "n",
    "uid": "u",
    "resourceVersion": "7",
    "labels": {"a": "b"},
    "managedFields": [{"manager": "x", "fieldsV1": {"f:spec": {}}}],
    "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "rollout.dev/kept": "yes"},
    "ownerReferences": [{"kind": "Sandbox", "name": "s", "uid": "o", "controller": True}],
}


def test_cached_pod_has_its_node_state_and_owner_but_not_its_command() -> None:
    terminated = {"terminated": {"exitCode": 3, "reason": "Error", "message": "overlay: denied"}}
    pod = {
        "metadata": METADATA,
        "spec": {
            "nodeName": "node-1",
            "hostUsers": False,
            "containers": [{"name": "sandbox", "command": ["x"] * 100, "env": [{"name": "A", "value": "1"}]}],
            "volumes": [
                {"name": "rollout-executor", "image": {"reference": "i"}},
                {"name": "data", "image": {"reference": "j"}},
                {"name": "state", "emptyDir": {}},
            ],
        },
        "status": {
            "phase": "Failed",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [
                {"name": "sandbox", "ready": False, "restartCount": 0, "state": terminated, "imageID": "sha256:1"}
            ],
        },
    }
    kept = prune("Pod", pod)
    assert kept["metadata"] == {
        key: METADATA[key] for key in METADATA if key not in ("managedFields", "annotations")
    } | {"annotations": {"rollout.dev/kept": "yes"}}
    assert kept["spec"] == {
        "nodeName": "node-1",
        "hostUsers": False,
        "volumes": [{"name": "rollout-executor", "image": {}}],
    }
    assert kept["status"]["containerStatuses"] == [
        {"name": "sandbox", "ready": False, "restartCount": 0, "state": terminated}
    ]
    assert (kept["status"]["phase"], kept["status"]["podIP"]) == ("Failed", "10.0.0.1")


def test_specs_statuses_and_metadata_are_kept_unchanged() -> None:
    for kind in ("Sandbox", "ModelServer"):
        obj = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": kind,
            "metadata": METADATA,
            "spec": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
            "status": {"observedGeneration": 4},
        }
        kept = prune(kind, obj)
        assert (kept["spec"], kept["status"], kept["kind"]) == (obj["spec"], obj["status"], kind)
        assert "managedFields" not in kept["metadata"]


def test_a_job_keeps_the_number_of_its_tasks_and_none_of_their_text() -> None:
    server = {"replicas": 2, "podTemplate": {"spec": {}}}
    spec = {
        "suspend": False,
        "groupSize": 4,
        "tasks": {"inline": [{"name": str(number), "prompt": "x" * 1000} for number in range(3)]},
        "model": {"server": server},
        "runners": {"replicas": 3, "podTemplate": {"spec": {}}},
        "sandbox": {"podTemplate": {"spec": {"volumes": []}}, "image": "x"},
        "security": "Privileged",
        "plugins": [{"name": "a", "config": {"text": "x" * 1000}}],
    }
    kept = prune("RolloutJob", {"metadata": METADATA, "spec": spec, "status": {"observedGeneration": 4}})
    assert kept["spec"] == {
        "suspend": False,
        "groupSize": 4,
        "tasks": {"inline": [None] * 3},
        "model": {"server": {"replicas": 2}},
        "runners": {"replicas": 3},
        "sandbox": {"podTemplate": {"spec": {"volumes": []}}},
        "security": "Privileged",
    }
    assert kept["status"] == {"observedGeneration": 4}
    assert "annotations" not in kept["metadata"]


def test_cached_node_has_its_readiness_and_the_features_of_its_runtime() -> None:
    handlers = [{"name": "runc", "features": {"userNamespaces": True}}]
    node = {
        "metadata": {
            "name": "node-1",
            "uid": "u",
            "resourceVersion": "1",
            "labels": {"a": "b", "userns.rollout.dev/default": "false"},
            "annotations": {"c": "d"},
        },
        "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "podCIDR": "10.0.0.0/24"},
        "status": {
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                },
            ],
            "runtimeHandlers": handlers,
            "nodeInfo": {"containerRuntimeVersion": "containerd://2.1", "bootID": "b"},
            "images": [{"names": ["x"] * 50}],
        },
    }
    kept = prune("Node", node)
    assert kept["status"] == {
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        "runtimeHandlers": handlers,
        "nodeInfo": {"containerRuntimeVersion": "containerd://2.1"},
    }
    assert (kept["spec"], kept["metadata"]["labels"]) == ({}, {"userns.rollout.dev/default": "false"})


LONG = "x" * 1_000_000
OF_A_MEGABYTE: list[tuple[str, dict[str, Any]]] = [
    (
        "Sandbox",
        {"metadata": METADATA | {"ownerReferences": [{"uid": "o", "name": LONG, "controller": True}]}, "spec": {}},
    ),
    ("Sandbox", {"metadata": METADATA | {"labels": {"a": LONG}}, "spec": {}}),
    ("ModelServer", {"metadata": METADATA, "spec": {"podTemplate": {"a": LONG}}}),
    ("RolloutJob", {"metadata": METADATA, "spec": {"sandbox": {"podTemplate": {"a": LONG}}}}),
    ("RolloutShard", {"metadata": METADATA, "status": {"index": 0, "outcomes": {LONG: 1}}}),
    ("Job", {"metadata": METADATA, "spec": {"selector": {"matchLabels": {"a": LONG}}}}),
    ("Pod", {"metadata": METADATA, "spec": {"volumes": [{"name": "a", "image": {"reference": LONG}}]}}),
    ("Pod", {"metadata": METADATA, "spec": {"volumes": [{"name": f"v{n}", "image": {}} for n in range(20_000)]}}),
    ("Pod", {"metadata": METADATA, "spec": {}, "status": {"phase": "Pending", "conditions": [CONDITION] * 5_000}}),
    ("Pod", {"metadata": METADATA, "spec": {}, "status": {"phase": "Failed", "containerStatuses": [{"name": LONG}]}}),
    ("Job", {"metadata": METADATA, "spec": {}, "status": {"conditions": [CONDITION] * 5_000}}),
    ("NetworkPolicy", {"metadata": METADATA | {"annotations": {"a": LONG}}}),
    ("NetworkPolicy", {"metadata": METADATA | {"annotations": {"rollout.dev/a": LONG}}}),
    ("Service", {"metadata": METADATA | {"labels": {f"rollout.dev/{n}": "x" * 60 for n in range(10_000)}}}),
]


@pytest.mark.parametrize(("kind", "obj"), OF_A_MEGABYTE)
def test_cached_object_of_a_megabyte_uses_little_memory(kind: str, obj: dict[str, Any]) -> None:
    assert len(json.dumps(prune(kind, obj))) < 2_000


def test_a_job_keeps_its_suspension_its_number_of_runners_and_its_status() -> None:
    spec = {"suspend": True, "completions": 2, "parallelism": 0}
    job = {"metadata": METADATA, "spec": {**spec, "template": {"spec": {}}}, "status": {"succeeded": 1}}
    kept = prune("Job", job)
    assert (kept["spec"], kept["status"]) == (spec, {"succeeded": 1})


def test_workloads_of_model_servers_keep_replicas_and_the_digest() -> None:
    body = {
        "metadata": METADATA,
        "spec": {"replicas": 3, "template": {"spec": {"containers": [{}] * 100}}},
        "status": {},
    }
    for kind in ("StatefulSet", "LeaderWorkerSet"):
        kept = prune(kind, body)
        assert kept["spec"] == {"replicas": 3}
        assert kept["metadata"]["annotations"] == {"rollout.dev/kept": "yes"}
        assert kept["metadata"]["resourceVersion"] == "7"
