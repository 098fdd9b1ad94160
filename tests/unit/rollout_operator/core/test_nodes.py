"""Node labels depend only on the kubelet's report, and counts over nodes stay right however nodes change."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.on_cluster.nodes import has_image_volumes, has_user_namespaces
from rollout_operator.actions import Plan
from rollout_operator.cache import Cache
from rollout_operator.nodes import plan
from tests.unit.rollout_operator.sandbox.objects import Json, node

KEY = "userns.rollout.dev/default"


def label_change(found: Json) -> dict[str, Any]:
    """Return the changes of labels in the plan for a node."""
    planned = plan(found)
    if planned == Plan():
        return {}
    (action,) = planned.actions
    labels: dict[str, Any] = action.change["metadata"]["labels"]  # type: ignore[union-attr]
    return labels


def test_node_is_labelled_when_its_kubelet_reports_no_user_namespaces() -> None:
    assert label_change(node(user_namespaces=False)) == {KEY: "false"}
    assert label_change(node(user_namespaces=False, labels={KEY: "false"})) == {}


def test_node_without_any_report_of_runtime_handlers_is_labelled() -> None:
    old = node()
    del old["status"]["runtimeHandlers"]
    assert label_change(old) == {KEY: "false"}


def test_label_is_removed_after_an_upgrade_of_the_node() -> None:
    assert label_change(node(labels={KEY: "false"})) == {KEY: None}


def test_label_that_an_administrator_set_is_kept_and_counts() -> None:
    avoided = node(labels={KEY: "overlay-is-broken"})
    assert label_change(avoided) == {}
    assert not has_user_namespaces(avoided, "")


def test_node_that_is_not_ready_is_not_labelled() -> None:
    assert label_change(node(user_namespaces=False, ready=False)) == {}


def test_node_with_a_starting_kubelet_does_not_lack_user_namespaces() -> None:
    starting = node(handlers={}, ready=False)
    assert has_user_namespaces(starting, "")
    assert not has_user_namespaces(node(handlers={}, ready=True), "")
    assert not has_user_namespaces(node(handlers={}, ready=False, labels={KEY: "false"}), "")


def test_each_runtime_handler_has_its_own_label() -> None:
    found = node(handlers={"": True, "kata": False, "not_a-label/x": False})
    assert label_change(found) == {"userns.rollout.dev/kata": "false"}
    assert has_user_namespaces(found, "")
    assert not has_user_namespaces(found, "kata")


@pytest.mark.parametrize(
    ("runtime", "works"),
    [
        ("containerd://2.1.0", True),
        ("containerd://2.4.2", True),
        ("containerd://2.0.5", False),
        ("containerd://1.7.27", False),
        ("cri-o://1.31.1", True),
        ("cri-o://1.30.9", False),
        ("docker://28.0", False),
        ("containerd://v2.1", True),
        ("somethingnew://7", True),
        ("", True),
    ],
)
def test_image_volumes_depend_on_the_version_of_the_runtime(runtime: str, works: bool) -> None:
    assert has_image_volumes(node(runtime=runtime)) is works


NODES = st.builds(
    node,
    st.sampled_from(["n1", "n2", "n3"]),
    ready=st.booleans(),
    runtime=st.sampled_from(["containerd://2.1.0", "containerd://1.7.2"]),
    handlers=st.dictionaries(st.sampled_from(["", "kata"]), st.booleans()),
    labels=st.dictionaries(st.just(KEY), st.sampled_from(["false", "broken"])),
)


@given(st.lists(NODES | st.sampled_from(["n1", "n2", "n3"]), max_size=12))
def test_counts_equal_those_of_the_nodes_in_the_cache_after_any_changes(changes: list[Json | str]) -> None:
    cache = Cache()
    for change in changes:
        if isinstance(change, str):
            cache.remove("Node", "", change)
        else:
            cache.put("Node", change)
    nodes = list(cache.all("Node"))
    assert (cache.nodes.total, cache.nodes.ready, cache.nodes.without_image_volumes) == (
        len(nodes),
        sum(each["status"]["conditions"][0]["status"] == "True" for each in nodes),
        sum(not has_image_volumes(each) for each in nodes),
    )
    for handler in ("", "kata"):
        assert cache.nodes.with_user_namespaces(handler) == sum(has_user_namespaces(each, handler) for each in nodes)
