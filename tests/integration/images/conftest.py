"""Real images, unpacked, and an executor started from its bundle in a separate root, as in a container.

Needs root on Debian. The roots are made of installed packages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import images
from tests.support.cluster import REPOSITORY
from tests.support.images import SAYS_HELLO, build, compile_c, compile_for_musl, require_compilers, unpack

TOKEN = "a token that only the test knows"
START_SECONDS = 20.0
# As the container runtime does: namespaces, the image's root, /proc, /dev, the two volumes of a sandbox pod.
AS_A_CONTAINER = """
set -e
mount --bind "$ROOT" "$ROOT"
mkdir -p "$ROOT"/proc "$ROOT"/sys "$ROOT"/dev "$ROOT"/.rollout/executor "$ROOT"/.rollout/state
mount -t proc proc "$ROOT"/proc
mount --rbind /dev "$ROOT"/dev
mount --bind -o ro "$BUNDLE" "$ROOT"/.rollout/executor
mount --bind "$STATE" "$ROOT"/.rollout/state
cd "$ROOT"
# Not chroot alone: the kernel refuses user namespaces to who has been chrooted.
mount --move "$ROOT" /
exec env -i "$@"
"""


@pytest.fixture(scope="session", autouse=True)
def needs_root() -> None:
    require_compilers()


@pytest.fixture(scope="session")
def workshop() -> Iterator[Path]:
    """A folder for roots. It is not pytest's own, which would keep them after the tests."""
    folder = Path(tempfile.mkdtemp(prefix="images-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def bundle(workshop: Path) -> Path:
    """The files of the executor's image."""
    (archive,) = build("executor")
    ((folder,), _) = unpack(archive, workshop)
    return folder


@pytest.fixture(scope="session")
def debian(workshop: Path) -> Path:
    """A Debian with Python."""
    base = subprocess.run([REPOSITORY / "hack/images/base"], stdout=subprocess.PIPE, text=True, check=True)
    ((folder,), _) = unpack(Path(base.stdout.strip()), workshop)
    return folder


@pytest.fixture(scope="session")
def busybox(workshop: Path) -> Path:
    """A shell and small tools, no Python, no libc."""
    root = workshop / "busybox"
    (root / "bin").mkdir(parents=True)
    shutil.copy(images.busybox(), root / "bin/busybox")
    subprocess.run(["chroot", root, "/bin/busybox", "--install", "-s", "/bin"], check=True)
    compile_c(SAYS_HELLO, root / "hello", "-static")
    return root


@pytest.fixture(scope="session")
def musl(workshop: Path) -> Path:
    """Like Alpine: musl is its only libc."""
    root = workshop / "musl"
    loader = compile_for_musl(SAYS_HELLO, root / "hello")
    (root / "lib").mkdir()
    shutil.copy(os.path.realpath(loader), root / loader.lstrip("/"))
    return root


@pytest.fixture(scope="session")
def scratch(workshop: Path) -> Path:
    """One static program and nothing else."""
    compile_c(SAYS_HELLO, workshop / "scratch/hello", "-static")
    return workshop / "scratch"


@pytest.fixture(scope="session")
def debian_hello(debian: Path) -> Path:
    """The Debian root, with the program that the other roots have."""
    compile_c(SAYS_HELLO, debian / "hello")
    return debian


class Container:
    """An executor that runs as PID 1 of a root."""

    def __init__(self, root: Path, bundle: Path, mode: str, variables: Mapping[str, str]) -> None:
        self.state = Path(tempfile.mkdtemp(prefix="state-"))
        self.address = f"unix:{self.state}/socket"
        config = {
            "listen": "unix:/.rollout/state/socket",
            "tokenSha256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "mode": mode,
            "places": 4,
            "stateDir": "/.rollout/state",
        }
        launcher = "/.rollout/executor/executor"
        start = [str(shutil.which("chroot")), ".", launcher, "--config-json", json.dumps(config)]
        self.log = self.state / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", AS_A_CONTAINER, "-"]
                + [f"{name}={value}" for name, value in variables.items()]
                + start,
                env=os.environ | {"ROOT": str(root), "BUNDLE": str(bundle), "STATE": str(self.state)},
                stderr=log,
            )

    async def wait_until_it_listens(self) -> None:
        """Wait until a probe succeeds. Fails with the executor's own output if it ends."""
        connector = aiohttp.UnixConnector(self.address.removeprefix("unix:"))
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(START_SECONDS):
            while self._process.poll() is None:
                try:
                    async with session.get("http://executor/healthz") as response:
                        assert response.status == 200
                        return
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.01)
        raise AssertionError(f"ended with {self._process.returncode}: {self.log.read_text()}")

    def end(self) -> int:
        """End the container by SIGTERM; return its exit status."""
        if self._process.poll() is None:
            # unshare's child, which is PID 1 in there.
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGTERM)
        try:
            return self._process.wait(START_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self.state)


@pytest.fixture
def run_container(bundle: Path) -> Callable[..., Any]:
    """`async with run_container(root, mode, **variables) as container`: an executor that listens."""

    @asynccontextmanager
    async def run(root: Path, mode: str, **variables: str) -> AsyncIterator[Container]:
        container = Container(root, bundle, mode, variables)
        try:
            await container.wait_until_it_listens()
            yield container
        finally:
            container.end()

    return run


@pytest.fixture(scope="session")
def compile_library() -> Callable[[str, Path], Path]:
    """A shared library from C."""
    return lambda code, place: compile_c(code, place, "-shared", "-fPIC")


@pytest.fixture(scope="session")
def run_bundle(bundle: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_bundle(folder, *arguments)` runs the bundle's image as nobody, like an init container, with `folder` at
    /copied.
    """
    script = """
        set -e
        mkdir -p "$ROOT" && mount -t tmpfs -o mode=755 tmpfs "$ROOT"
        cp -a "$BUNDLE"/. "$ROOT" && mkdir "$ROOT"/proc "$ROOT"/copied
        mount -t proc proc "$ROOT"/proc && mount --bind "$COPIED" "$ROOT"/copied
        exec chroot --userspec 65534:65534 --groups= "$ROOT" /executor "$@"
    """

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as root:
            return subprocess.run(
                ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script, "-", *arguments],
                env=os.environ | {"ROOT": root, "BUNDLE": str(bundle), "COPIED": str(folder)},
                capture_output=True,
                text=True,
                check=False,
            )

    return run


@pytest.fixture(scope="session")
def build_images() -> Callable[..., list[Path]]:
    """`build`, for tests."""
    return build


@pytest.fixture(scope="module")
def mounted(workshop: Path) -> Iterator[Callable[[str], tuple[Path, dict[str, Any]]]]:
    """`mounted(target)` returns an image's root folder and its configuration."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(target: str) -> tuple[Path, dict[str, Any]]:
        if target not in done:
            (archive,) = build(target)
            layers, configuration = unpack(archive, workshop)
            root = workshop / f"image-{target}"
            root.mkdir()
            # A read-only overlay needs at least two layers, so an empty one is added.
            (workshop / "empty").mkdir(exist_ok=True)
            lower = ":".join(map(str, [*reversed(layers), workshop / "empty"]))
            subprocess.run(["mount", "-t", "overlay", "-o", f"lowerdir={lower}", "overlay", root], check=True)
            done[target] = root, configuration
        return done[target]

    yield get
    for root, _ in done.values():
        subprocess.run(["umount", root], check=True)
