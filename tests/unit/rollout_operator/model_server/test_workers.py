"""A trainer that reads Dynamo's worker discovery finds our servers, and only verified ones."""

import json
from typing import Any

from rollout_operator.endpoints import instance_id, workers


def model_server(namespace: str, *servers: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "ModelServer",
        "metadata": {"name": "qwen", "namespace": namespace, "uid": "u"},
        "spec": {
            "model": {"name": "Qwen/Qwen3-8B"},
            "engine": {"image": "vllm:1", "version": "0.27.0"},
            "parallelism": {"tensor": 4},
        },
        "status": {"servers": list(servers)},
    }


def server(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "url": "http://10.0.0.7:8000", "uid": f"uid-{name}", **more}


def test_dynamo_client_finds_the_addresses_and_ranks_of_workers() -> None:
    ready = server("qwen-0", ready=True, state="Ready", policyVersion=3)
    answer = json.loads(json.dumps(workers([model_server("lab", ready)], "lab")))
    assert (answer["protocol_version"], answer["namespace"]) == (1, "lab")
    (worker,) = answer["workers"]
    assert worker["admin_base_url"] == worker["system_url"] == "http://10.0.0.7:8001"
    assert (worker["component"], worker["model"], worker["world_size"]) == ("qwen", "Qwen/Qwen3-8B", 4)
    assert {"pause", "resume", "update_weights"} <= set(worker["routes"])
    assert worker["routes"] == sorted(worker["routes"])
    assert "error" not in worker


def test_server_without_the_current_policy_is_listed_as_not_ready() -> None:
    found = workers([model_server("lab", server("qwen-0", state="PendingWeights"), server("qwen-1", url=""))])
    (worker,) = found["workers"]
    assert "current policy" in worker["error"]


def test_replacing_pod_is_another_instance_with_a_json_safe_number() -> None:
    one, other = instance_id("uid-1"), instance_id("uid-2")
    assert one != other
    assert max(one, other) < 2**53
    assert int(float(one)) == one


def test_servers_of_others_and_invalid_objects_are_left_out() -> None:
    broken = {"metadata": {"name": "x", "namespace": "lab"}, "spec": {}}
    found = workers([model_server("other", server("qwen-0")), broken], "lab")
    assert found["workers"] == []
