"""A malformed ModelServer is reported by field, or the API server refuses its objects; the operator never fails."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_api.on_cluster.model_server_problems import parse
from rollout_operator.cache import Cache
from rollout_operator.model_server import observe, plan
from rollout_operator.world import Memory, World
from tests.unit.rollout_operator.model_server.scenes import CONFIG, NOW, manifest

LEAST = {"model": {"name": "m"}, "engine": {"image": "v", "version": "0.27.0"}}
SCALAR = st.none() | st.booleans() | st.integers(-1, 5) | st.text("ab:/ ", max_size=3)
KEYS = st.sampled_from(["name", "key", "value", "matchLabels", "limits", "memory", "env", "engine"])
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3))
POD_FIELDS = st.sampled_from(
    ["containers", "initContainers", "volumes", "affinity", "tolerations", "securityContext", "imagePullSecrets"]
)
CONTAINER = st.dictionaries(
    st.sampled_from(["resources", "env", "volumeMounts", "ports", "args", "command", "readinessProbe", "startupProbe"]),
    JSON,
    max_size=3,
).map(lambda fields: {"name": "engine", **fields})
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": JSON | st.dictionaries(st.sampled_from(["labels", "annotations"]), JSON),
        "spec": JSON | st.dictionaries(POD_FIELDS, JSON | st.lists(CONTAINER, max_size=2), max_size=3),
    },
)


def look(spec: dict[str, Any]) -> None:
    world = World(Cache(), CONFIG, NOW, Memory(), {"uid-1": "key"})
    plan(observe(world, manifest(spec)))


@given(TEMPLATES)
@example({"metadata": {"labels": 5}})
@example({"spec": {"affinity": {"nodeAffinity": "x"}}})
def test_any_pod_template_is_answered(template: dict[str, Any]) -> None:
    look({**LEAST, "podTemplate": template})


@pytest.mark.parametrize(
    "spec",
    [
        {"clients": [{"podSelector": 5}]},
        {"clients": [{"podSelector": {"matchExpressions": 5}}]},
        {"clients": [{"namespaceSelector": "x"}]},
        {"clients": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]},
        {"weightTransfer": {"mode": "Push", "push": {"hook": "http://h", "peers": {"matchLabels": 5}}}},
        {"podTemplate": {"metadata": {"labels": 5}}},
    ],
)
def test_malformed_selectors_and_labels_are_named_by_field(spec: dict[str, Any]) -> None:
    _, problems = parse(manifest({**LEAST, **spec}), [])
    assert problems[0].path.startswith(f"spec.{next(iter(spec))}")
