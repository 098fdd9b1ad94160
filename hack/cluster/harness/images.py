"""Images of the nodes, loaded from archives because there is no registry."""

import subprocess
import time
from pathlib import Path

from . import nodes
from .archives import image_names
from .layout import Node

SEEN_LABEL = "io.cri-containerd.image"
# Avoids containerd's transfer service, with which ctr 2.4 sometimes loses the end of its output to a pipe.
LOCAL = "--local"


def load(node: Node, programs: Path, archive: Path) -> None:
    """Loads a docker or OCI archive into a node. Raises NodeError, and ArchiveError if the file is no such archive."""
    loaded = image_names(archive)
    # Through standard input, because the archive's folder may not be visible on the node.
    with archive.open("rb") as file:
        nodes.run_in(node, _import(programs), stdin=file)
    for name in loaded:
        _announce(node, programs, name)


def names(node: Node, programs: Path) -> list[str]:
    listed = nodes.run_in(node, [*_ctr(programs), "list", "--quiet"]).split()
    return [name for name in listed if not name.startswith("sha256:")]


def copy(source: Node, target: Node, programs: Path) -> None:
    """Copies all images of a node to another. Raises NodeError."""
    command = nodes.command_in(source, [*_ctr(programs), "export", LOCAL, "-", *names(source, programs)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as export:
        nodes.run_in(target, _import(programs), stdin=export.stdout)
    if export.returncode != 0:
        raise nodes.NodeError(f"the images of node {source.name} could not be read: exit code {export.returncode}")


def _announce(node: Node, programs: Path, name: str) -> None:
    """Makes containerd's Kubernetes plugin read an image again.

    Otherwise it does not notice that a known name now refers to another image, and image volumes are empty. It marks
    images that it has read with a label; when the label is removed, it reads the image again and sets the label.
    """
    nodes.run_in(node, [*_ctr(programs), "label", name, f"{SEEN_LABEL}="])
    deadline = time.monotonic() + 10
    while SEEN_LABEL not in nodes.run_in(node, [*_ctr(programs), "list", f"name=={name}"]):
        if time.monotonic() > deadline:
            raise nodes.NodeError(f"containerd of node {node.name} did not read image {name} again; see its log")
        time.sleep(0.02)


def _import(programs: Path) -> list[str]:
    return [*_ctr(programs), "import", LOCAL, "-"]


def _ctr(programs: Path) -> list[str]:
    return [str(programs / "ctr"), "--namespace", "k8s.io", "images"]
