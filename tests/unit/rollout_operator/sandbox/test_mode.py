"""Overlay or Plain: nobody silently loses isolation or speed, and whoever gets Plain is told why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.sandbox import WorkspaceMode
from rollout_operator.sandbox.mode import Choice, choose, image_volumes_work
from rollout_operator.sandbox.placement import Node

AUTO, OVERLAY, PLAIN = WorkspaceMode.AUTO, WorkspaceMode.OVERLAY, WorkspaceMode.PLAIN
ABLE, UNABLE = Node("able", user_namespaces=frozenset({""})), Node("unable")
FAILED = Node("failed", user_namespaces=frozenset({""}), trial_failure="mount: EPERM")
NODES = st.lists(st.sampled_from([ABLE, UNABLE, FAILED]), max_size=4)


def test_overlay_where_every_node_can() -> None:
    assert choose(AUTO, [ABLE, ABLE]) == Choice(OVERLAY, "Supported", "")


def test_overlay_on_the_nodes_that_can_when_only_some_do() -> None:
    choice = choose(AUTO, [ABLE, UNABLE, FAILED])
    assert (choice.mode, list(choice.nodes), list(choice.others)) == (OVERLAY, [ABLE], [UNABLE, FAILED])


def test_plain_where_no_node_can_and_the_reason_says_what_is_missing() -> None:
    choice = choose(AUTO, [UNABLE, UNABLE])
    assert (choice.mode, choice.reason) == (PLAIN, "NodesLackUserNamespaces")
    assert "none of 2 nodes reports user namespaces" in choice.message


def test_plain_where_it_was_tried_and_failed_and_the_reason_is_the_executors_own() -> None:
    choice = choose(AUTO, [UNABLE, FAILED])
    assert (choice.mode, choice.reason) == (PLAIN, "TrialFailed")
    assert "node failed: mount: EPERM" in choice.message


def test_a_cluster_whose_nodes_are_made_on_demand_is_given_a_try() -> None:
    assert choose(AUTO, []).mode == OVERLAY


@given(NODES, st.none() | st.just("refused"), st.none() | st.just("failed"))
def test_who_asks_for_plain_gets_it_and_nobody_gets_overlay_after_it_failed(
    nodes: list[Node], refusal: str | None, failure: str | None
) -> None:
    assert choose(PLAIN, nodes, admission_refusal=refusal, trial_failure=failure) == Choice(
        PLAIN, "NotAsked", "spec.workspaces.mode is Plain"
    )
    choice = choose(AUTO, nodes, admission_refusal=refusal, trial_failure=failure)
    if refusal or failure:
        assert choice.mode == PLAIN
        assert choice.message == (failure or refusal)
    assert (choice.mode == OVERLAY) == (choice.reason == "Supported")


def test_only_the_pods_own_runtime_handler_counts() -> None:
    kata = Node("kata", user_namespaces=frozenset({"kata"}))
    assert choose(AUTO, [kata], handler="kata").mode == OVERLAY
    assert choose(AUTO, [kata]).mode == PLAIN
    assert "runtime handler kata" in choose(AUTO, [ABLE], handler="kata").message


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
def test_the_executor_comes_as_an_image_volume_where_every_runtime_has_them(runtime: str, works: bool) -> None:
    assert image_volumes_work([ABLE, Node("n", runtime=runtime)]) is works


def test_a_node_that_mounted_the_image_noexec_is_not_asked_again() -> None:
    assert not image_volumes_work([Node("n", runtime="containerd://2.1.0", exec_failure="permission denied")])
