"""Sandboxes of images that have next to nothing, by the real container runtime. Those with Debian are in all other tests."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.images import SAYS_HELLO, busybox, compile_c, compile_for_musl
from tests.support.sandboxes import ByHand

SHELL_TOOLS = ("sh", "cat", "wc")


def busybox_files(folder: Path) -> Mapping[str, Path]:
    """A shell and small tools, no Python, no libc."""
    tools = {f"/bin/{name}": busybox() for name in SHELL_TOOLS}
    return {"/hello": compile_c(SAYS_HELLO, folder / "hello", "-static"), **tools}


def musl_files(folder: Path) -> Mapping[str, Path]:
    """Like Alpine: musl is the libc of all that there is."""
    loader = compile_for_musl(SAYS_HELLO, folder / "hello")
    return {"/hello": folder / "hello", loader: Path(loader)}


def scratch_files(folder: Path) -> Mapping[str, Path]:
    """One static program and nothing else."""
    return {"/hello": compile_c(SAYS_HELLO, folder / "hello", "-static")}


FILES = {"busybox": busybox_files, "musl": musl_files, "scratch": scratch_files}


@pytest.mark.parametrize("kind", FILES)
def test_a_pod_of_any_image_is_a_sandbox_in_both_modes(
    cluster: Cluster, namespace: str, load_image: Callable[..., str], kind: str, tmp_path: Path
) -> None:
    image = load_image(kind, FILES[kind](tmp_path))
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
        if kind == "busybox":
            assert sandbox.run("sh", "-c", "echo one > file; cat file | wc -l") == "1\n"
