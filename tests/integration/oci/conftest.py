"""Real images: made by buildah, in a store of their own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_runtime.sandboxes.images.store import ImageStore

REPOSITORY = Path(__file__).parents[3]


class Buildah:
    """buildah with a store of its own, so that removing the folder removes everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._command = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self._command, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def layer(self, base: str, change: Callable[[Path], None], *config: str) -> str:
        """Build an image: `base`, and a layer with that change."""
        container = self("from", "--pull-never", base)
        change(Path(self("mount", container)))
        self("umount", container)
        if config:
            self("config", *config, container)
        # Uncompressed, because compression takes time.
        image = self("commit", "-q", "--disable-compression", container)
        self("rm", container)
        return image

    def archive(self, image: str, place: Path, form: str = "oci-archive") -> Path:
        """Write the image as an archive or a layout."""
        self("push", "-q", "--disable-compression", image, f"{form}:{place}:image")
        return place


@pytest.fixture(scope="session")
def buildah() -> Iterator[Buildah]:
    assert os.geteuid() == 0, "images are made by root; run these tests as root"
    assert shutil.which("buildah"), "buildah is missing; run hack/install-test-tools"
    folder = Path(tempfile.mkdtemp(prefix="oci-"))
    made = Buildah(folder)
    yield made
    made("rm", "--all")
    subprocess.run(["umount", "-q", folder / "storage/overlay"], check=False)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def debian(buildah: Buildah) -> str:
    """A Debian with Python, in the store."""
    base = subprocess.run([REPOSITORY / "hack/images/base"], stdout=subprocess.PIPE, text=True, check=True)
    return buildah("pull", "-q", f"docker-archive:{base.stdout.strip()}")


@pytest.fixture(scope="session")
def store(buildah: Buildah) -> ImageStore:
    """One cache for all tests that do not ask for their own."""
    return ImageStore(Path(), buildah.folder / "unpacked")
