"""Where Overlay is unavailable on a real API server and runtime, a sandbox is Plain, and its condition says why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, eventually
from tests.support.images import SAYS_HELLO, busybox, compile_c
from tests.support.sandboxes import ByHand


def assert_plain(sandbox: ByHand, reason: str) -> str:
    """Check that the Sandbox fell back to Plain for that reason. Returns the message."""
    overlay = sandbox.condition("Overlay")
    assert (overlay["status"], overlay["reason"]) == ("False", reason), sandbox.describe()
    assert (sandbox.object["status"]["mode"], sandbox.object["status"]["places"]["total"]) == ("Plain", 1)
    assert "hostUsers" not in sandbox.pod["spec"]
    return str(overlay["message"])


@pytest.mark.full
def test_sandbox_is_plain_with_the_reason_where_overlay_is_refused(
    cluster: Cluster, new_namespace: Callable[..., str]
) -> None:
    namespace = new_namespace("restricted")
    # A number that is not root is all that a restricted namespace lets in, and it may not write just anywhere.
    fitting = {"user": "1000", "workingDir": "/tmp/workspace"}
    sandbox = ByHand(cluster, namespace, "auto").apply(**fitting, workspaces={"perSandbox": 4}).wait_ready()
    assert 'violates PodSecurity "restricted' in assert_plain(sandbox, "AdmissionRefused")
    assert sandbox.run("id", "-u") == "1000\n"

    refused = {
        "overlay": (
            {**fitting, "workspaces": {"mode": "Overlay"}},
            "spec.workspaces.mode: Overlay is unavailable here",
        ),
        "root": ({}, "set spec.user to a uid such as 1000"),
    }
    for name, (spec, words) in refused.items():
        finished = ByHand(cluster, namespace, name).apply(**spec, whenFinished="Retain").wait_finished()
        assert (finished["reason"], words in finished["message"]) == ("Invalid", True), finished
        assert 'violates PodSecurity "restricted' in finished["message"]
        assert cluster.get("pod", name, namespace) is None


@pytest.mark.full
def test_pod_is_made_again_as_plain_when_the_executors_overlay_trial_fails(
    cluster: Cluster, namespace: str, load_image: Callable[..., str], tmp_path: Path
) -> None:
    # The trial runs `true` in a workspace. This one ends with 3.
    failing = compile_c(SAYS_HELLO, tmp_path / "hello", "-static")
    image = load_image("no-overlay", {"/bin/echo": busybox(), "/bin/true": failing})
    sandbox = ByHand(cluster, namespace, "auto").apply(image=image, workspaces={"perSandbox": 4})
    # Its first pod is Ready for a moment, as long as the trial takes.
    eventually(lambda: sandbox.condition("Overlay").get("status") == "False" or None, 120, sandbox.describe)
    words = assert_plain(sandbox.wait_ready(), "TrialFailed")
    assert "Overlay failed on node" in words
    assert "`true` ended with" in words
    sandbox.assert_unharmed()
    told = cluster.kubectl("get", "events", "-n", namespace, "--field-selector=reason=OverlayTrialFailed").stdout
    assert "sandbox/auto" in told, "its first pod was not the one that failed"

    # A failed trial is remembered for its image, and not repeated. It is not remembered for other images.
    insisting = ByHand(cluster, namespace, "overlay")
    finished = insisting.apply(image=image, workspaces={"mode": "Overlay"}, whenFinished="Retain").wait_finished()
    assert (finished["reason"], "(TrialFailed: " in finished["message"]) == ("Invalid", True), finished
    other = ByHand(cluster, namespace, "other").apply(workspaces={"mode": "Overlay"}).wait_ready()
    assert other.condition("Overlay")["status"] == "True"
