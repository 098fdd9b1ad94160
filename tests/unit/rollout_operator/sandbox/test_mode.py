"""Overlay or Plain: no fallback is silent, and a Plain Sandbox says why."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_api.on_cluster.nodes import NodeCounts
from rollout_api.on_cluster.sandbox_pod import Choice, choose_mode
from rollout_api.sandbox import WorkspaceMode
from tests.unit.rollout_operator.sandbox.objects import Json, node

AUTO, OVERLAY, PLAIN = WorkspaceMode.AUTO, WorkspaceMode.OVERLAY, WorkspaceMode.PLAIN
ABLE, UNABLE = node("able"), node("unable", user_namespaces=False)


def counts(*nodes: Json) -> NodeCounts:
    counted = NodeCounts()
    for each in nodes:
        counted.add(each)
    return counted


def test_auto_is_overlay_when_at_least_one_node_can() -> None:
    assert choose_mode(AUTO, counts(ABLE, UNABLE)) == Choice(OVERLAY, "Supported", "")


def test_auto_is_plain_when_no_node_has_user_namespaces_and_gives_the_reason() -> None:
    choice = choose_mode(AUTO, counts(UNABLE, UNABLE))
    assert (choice.mode, choice.reason) == (PLAIN, "NodesLackUserNamespaces")
    assert "none of 2 nodes reports user namespaces" in choice.message


def test_auto_is_overlay_when_no_node_is_known_yet() -> None:
    assert choose_mode(AUTO, counts()).mode == OVERLAY


@given(
    st.lists(st.sampled_from([ABLE, UNABLE]), max_size=4), st.none() | st.just("refused"), st.none() | st.just("failed")
)
def test_plain_is_kept_and_overlay_is_not_chosen_after_a_failure(
    nodes: list[Json], refusal: str | None, failure: str | None
) -> None:
    counted = counts(*nodes)
    assert choose_mode(PLAIN, counted, admission_refusal=refusal, trial_failure=failure) == Choice(
        PLAIN, "NotAsked", "spec.workspaces.mode is Plain"
    )
    choice = choose_mode(AUTO, counted, admission_refusal=refusal, trial_failure=failure)
    if refusal or failure:
        assert choice.mode == PLAIN
        assert choice.message == (failure or refusal)
    assert (choice.mode == OVERLAY) == (choice.reason == "Supported")


def test_mode_depends_on_the_runtime_handler_of_the_pod_alone() -> None:
    kata = node("kata", handlers={"": False, "kata": True})
    assert choose_mode(AUTO, counts(kata), handler="kata").mode == OVERLAY
    assert choose_mode(AUTO, counts(kata)).mode == PLAIN
    assert "runtime handler kata" in choose_mode(AUTO, counts(ABLE), handler="kata").message
