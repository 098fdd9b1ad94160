"""Malformed manifests on a real API server: each is refused when it is applied, or its conditions name what is wrong."""

from typing import Any

import pytest

from tests.integration.operator_core.conftest import StartReplica
from tests.integration.operator_core.control_plane import ControlPlane, until

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
JOB: dict[str, Any] = {
    "tasks": {"inline": [{"name": "task", "prompt": "do it"}]},
    "agent": {"type": "Nop"},
    "sandbox": {"image": "localhost/none:1"},
    "output": {"uri": "s3://bucket/results"},
}
SERVER: dict[str, Any] = {"model": {"name": "m"}, "engine": {"image": "localhost/none:1", "version": "0.27.0"}}
OWN_SERVER = {**SERVER, "toolCallParser": "hermes"}


def template(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


SANDBOXES: list[dict[str, Any]] = [
    {"network": {"agent": 5}},
    {"network": {"agent": {"a": 1}}},
    {"network": {"agent": ["169.254.169.254:80"]}},
    template(affinity={"nodeAffinity": "x"}),
    template(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [1]}]}}}),
    template(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{"key": 5}]}]}}}),
    template(priorityClassName="nope"),
    template(topologySpreadConstraints=[{}]),
    template(hostAliases=[{"ip": "x"}]),
    {"podTemplate": {"spec": []}},
    {"podTemplate": {"metadata": {"labels": {"bad key!": "x"}}}},
    {"clients": {"matchLabels": 5}},
    {"clients": {"matchLabels": {"a b": "c"}}},
    {"clients": {"matchExpressions": "x"}},
    {"clients": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
    {"resources": {"cpu": "1ki"}},
    {"resources": {"memory": "0"}},
    {"podTemplate": {"metadata": {"labels": {"rollout.dev/😀": "x"}}}},
    {"runtimeClassName": "nope"},
    {"image": " "},
    {"security": "Privileged"},
]
JOBS: list[dict[str, Any]] = [
    {"output": {"uri": "s3://"}},
    {"output": {"uri": "😀"}},  # the message quotes it
    {"output": {"uri": "\x7f"}},
    {"model": {"serverRef": "nope"}},
    {"sandbox": {"image": "i", "resources": {"cpu": "1ki"}}},
    {"sandbox": {"image": "i", **template(affinity="x")}},
    {"sandbox": {"image": "i", **template(hostNetwork=True)}},
    {"security": "Privileged", "sandbox": {"image": "i", "podTemplate": {"spec": "x"}}},
    {"model": {"server": {**OWN_SERVER, "clients": [{"podSelector": 5}]}}},
    {"model": {"server": {**OWN_SERVER, "podTemplate": {"metadata": {"labels": 5}}}}},
]
SERVERS: list[dict[str, Any]] = [
    {"clients": [{"podSelector": "x"}]},
    {"clients": [{"podSelector": {"matchExpressions": 5}}]},
    {"clients": [{"namespaceSelector": "x"}]},
    {"podTemplate": {"metadata": {"labels": 5}}},
    template(containers=[{"name": "engine", "env": 5}]),
    template(containers=[{"name": "engine", "resources": {"limits": {"memory": "x"}}}]),
    {"cache": {"size": "0"}},
    {"resources": {"cpu": "2ki"}},
    {"accelerator": {"resourceName": "../x"}},
    {"accelerator": {"resourceName": "../😀"}},
    {"weightTransfer": {"mode": "Push", "push": {"hook": "http://h", "peers": {"matchLabels": 5}}}},
    {"weightTransfer": {"mode": "Push", "push": {"hook": "http://h", "peers": {"matchExpressions": 5}}}},
]
BASES = {
    "Sandbox": ({"image": "localhost/none:1"}, SANDBOXES),
    "RolloutJob": (JOB, JOBS),
    "ModelServer": (SERVER, SERVERS),
}


@pytest.mark.parametrize("kind", BASES)
def test_every_malformed_manifest_is_refused_or_gets_a_condition(
    plane: ControlPlane, namespace: str, start: StartReplica, kind: str
) -> None:
    replica = start("first")
    base, changes = BASES[kind]
    accepted = {}
    for number, change in enumerate(changes):
        body = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": f"hostile-{number}", "namespace": namespace},
            "spec": {**base, **change},
        }
        try:
            plane.apply(body)
        except AssertionError:
            continue
        accepted[f"hostile-{number}"] = change
    assert accepted, "the API server refuses all of them, so this test shows nothing about the operator"
    for name, change in accepted.items():

        def conditions(name: str = name) -> Any:
            found = plane.get(kind, name, namespace) or {}
            return (found.get("status") or {}).get("conditions")

        until(conditions, f"a condition on {kind} {name} with {change}")
    assert "Traceback" not in replica.log.read_text()
