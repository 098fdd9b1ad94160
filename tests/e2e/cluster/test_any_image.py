"""A sandbox of an image with almost no files, run by the real container runtime. Other images: integration/images."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.images import SAYS_HELLO, compile_c
from tests.support.sandboxes import ByHand

pytestmark = pytest.mark.full


def test_pod_of_an_image_with_one_static_program_is_a_sandbox_in_both_modes(
    cluster: Cluster, namespace: str, load_image: Callable[..., str], tmp_path: Path
) -> None:
    image = load_image("scratch", {"/hello": compile_c(SAYS_HELLO, tmp_path / "hello", "-static")})
    sandboxes = {mode: ByHand(cluster, namespace, mode.lower()) for mode in ("Overlay", "Plain")}
    for mode, sandbox in sandboxes.items():
        variable = {"name": "OF_THE_IMAGE", "value": "variable"}
        sandbox.apply(image=image, workspaces={"mode": mode}, env=[variable])
    for mode, sandbox in sandboxes.items():
        assert sandbox.wait_ready().object["status"]["mode"] == mode
        pod = sandbox.pod["spec"]
        assert (pod.get("hostUsers"), "initContainers" in pod) == (False if mode == "Overlay" else None, False)
        assert any("image" in volume for volume in pod["volumes"]), "the executor comes as an image volume"

        said = sandbox.try_to_run("/hello", "you")
        assert (said.returncode, said.stdout) == (3, "hello you variable\n"), said.stderr
