"""Real podman with its own store, a small image, and the executor's bundle."""

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_api.sandbox import SandboxTemplate
from tests.support import kodo_double

REPOSITORY = Path(__file__).parents[3]
IMAGE = "localhost/small:1"
CONTAINERFILE = """
FROM scratch
COPY root /
ENV PATH=/bin GREETING=hello
USER 1000:1000
WORKDIR /app
ENTRYPOINT ["/bin/false"]
"""


def most(limit: int) -> str:
    """Return the largest value that this process may set for a limit. Podman's defaults may exceed it."""
    hard = resource.getrlimit(limit)[1]
    count = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    return f"{count}:{count}"


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session", autouse=True)
def engine() -> Iterator[None]:
    missing = [program for program in ("podman", "runc", "busybox") if not shutil.which(program)]
    assert os.geteuid() == 0, "run these tests as root"
    assert not missing, f"{missing} missing: run hack/install-test-tools"
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    (folder / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile={most(resource.RLIMIT_NOFILE)}", "nproc={most(resource.RLIMIT_NPROC)}"]\n'
        f'[engine]\nruntime = "runc"\n[engine.runtimes]\nrunc = ["{shutil.which("runc")}"]\n'
    )
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
    )
    executor = subprocess.run(
        [REPOSITORY / "hack/images/build", "executor"], stdout=subprocess.PIPE, text=True, check=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        patch.setenv("ROLLOUT_CONTAINER_ENGINE", "podman")
        patch.setenv("ROLLOUT_EXECUTOR_IMAGE", executor.stdout.strip())
        make_image(folder)
        kodo_double.stand_in()
        # What the real kodo, if it is here, takes for Docker.
        patch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        service = subprocess.Popen(["podman", "system", "service", "--time", "0", f"unix://{folder}/docker.sock"])
        yield
        podman("rm", "--all", "--force")
        service.terminate()
        service.wait()
        subprocess.run(["umount", "-q", folder / "storage/overlay"], check=False)
    shutil.rmtree(folder)


def make_image(folder: Path) -> None:
    root = folder / "context/root"
    for name in ("bin", "app", "etc"):
        (root / name).mkdir(parents=True)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    os.chown(root / "app", 1000, 1000)
    shutil.copy(str(shutil.which("busybox")), root / "bin/busybox")
    for name in ("sh", "cat", "id", "echo", "sleep", "ls", "mkdir", "grep", "kill"):
        (root / "bin" / name).symlink_to("busybox")
    (folder / "context/Containerfile").write_text(CONTAINERFILE)
    podman("build", "-q", "--isolation", "chroot", "-t", IMAGE, str(folder / "context"))


def template(**changes: object) -> SandboxTemplate:
    return SandboxTemplate.model_validate({"image": IMAGE, "idleSeconds": 120, "startSeconds": 60, **changes})
