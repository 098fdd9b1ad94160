"""Environments from Dockerfiles over one base: storage and time, beside buildah on this machine."""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from agent_runtime.builds.build import Builder, BuildOptions
from agent_runtime.builds.cache import BuildCache
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, SandboxProvider, WorkspaceSpec
from agent_runtime.sandboxes.images.store import ImageStore
from agent_runtime.sandboxes.local.provider import LocalProvider
from benchmarks.conversation import ROOT
from benchmarks.measuring import quantile
from benchmarks.report import Row, Target, comparison
from rollout_api.files import ContextFile, Dockerfile
from rollout_api.sandbox import SandboxTemplate
from tests.support.s3 import serve_s3

FAMILIES, ENVIRONMENTS = 10, 100
BUILDERS = 8  # concurrent builds, of both
BASE = "localhost/agent-rollouts-benchmark-base"


def dockerfiles() -> list[Dockerfile]:
    """Return environments as of a data set: families share a step that installs 20 MB, each has sources and a build."""
    source = "".join(f"def function_{line}(x):\n    return x + {line}\n" for line in range(500))
    return [
        Dockerfile(
            text=(
                f"FROM base\nRUN mkdir -p /opt/family-{number % FAMILIES} && cp -a /usr/lib/python3.11 "
                f"/opt/family-{number % FAMILIES}/lib\nWORKDIR /testbed\nCOPY . .\nRUN python3 -m compileall -q . && "
                f"useradd -m agent && chown -R agent .\nENV ENVIRONMENT={number}\n"
            ),
            context=[
                ContextFile(path=f"package/module_{name}.py", content=f"# {number}\n{source}") for name in range(5)
            ],
        )
        for number in range(ENVIRONMENTS)
    ]


def measure() -> list[Row]:
    """Return bytes stored, seconds of all builds, and time until the first tool result, cold and warm."""
    found = dockerfiles()
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-dockerfiles-") as folder:
        archive = subprocess.run(
            [ROOT / "hack/images/base"], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
        their_bytes, their_seconds, their_start = _buildah(found, archive, Path(folder))
        ours = asyncio.run(_ours(found, f"docker-archive:{archive}", Path(folder)))
    return [
        comparison(
            f"bytes stored for {ENVIRONMENTS} environments, without the base",
            ours["bytes"] / 1e6,
            "MB",
            "layers of buildah's images",
            their_bytes / 1e6,
            Target("at most", 0.1),
        ),
        comparison("all builds, the first time", ours["first"], "s", "buildah", their_seconds),
        Row("all steps looked up, the second time", ours["second"], "s"),
        comparison(
            "first result, layers only in storage, p50",
            ours["cold"] * 1e3,
            "ms",
            "buildah from, run",
            their_start * 1e3,
        ),
        Row(
            "first result, layers only in storage, p50 (goal)", ours["cold"] * 1e3, "ms", target=Target("at most", 1000)
        ),
        Row("first result, layers only in storage, p99", ours["cold99"] * 1e3, "ms"),
        Row(
            "first result, layers used before in the sandbox, p50",
            ours["warm"] * 1e3,
            "ms",
            target=Target("at most", 100),
        ),
    ]


async def _ours(found: list[Dockerfile], image: str, folder: Path) -> dict[str, float]:
    with serve_s3(folder) as s3:
        store = Store.open(s3.uri("environments"), s3.environ())
        images = ImageStore(folder, folder / "unpacked")
        async with _provider(folder / "one", image, images) as provider:
            first, _ = await _build(_builder(provider, store, image), found)
            second, specs = await _build(_builder(provider, store, image), found)
        size = sum(meta.size for meta in [*await store.list("layers"), *await store.list("builds")])
        # A new sandbox, as on another machine: only the base image is there.
        async with _provider(folder / "two", image, images) as provider:
            await _result(provider, WorkspaceSpec(group="base", working_dir="/", image=image), "warm-up")
            cold = [await _result(provider, spec, f"{number}-0") for number, spec in enumerate(specs)]
            warm = [await _result(provider, spec, f"{number}-1") for number, spec in enumerate(specs)]
    return {
        "bytes": size,
        "first": first,
        "second": second,
        "cold": quantile(cold, 0.5),
        "cold99": quantile(cold, 0.99),
        "warm": quantile(warm, 0.5),
    }


@asynccontextmanager
async def _provider(folder: Path, image: str, images: ImageStore) -> AsyncIterator[SandboxProvider]:
    provider = LocalProvider(folder, SandboxTemplate(image=image), places=BUILDERS, images=images)
    await provider.open()
    try:
        yield provider
    finally:
        await provider.close()


def _builder(provider: SandboxProvider, store: Store, image: str) -> Builder:
    run = store.below("run")
    return Builder(provider, BuildCache(store, run, Layers(store, run)), BuildOptions({"base": image}, {}, {}))


async def _build(builder: Builder, found: list[Dockerfile]) -> tuple[float, list[WorkspaceSpec]]:
    """Return the seconds of all builds, and the completed specifications."""
    free = asyncio.Semaphore(BUILDERS)

    async def one(number: int, dockerfile: Dockerfile) -> WorkspaceSpec:
        async with free:
            spec = WorkspaceSpec(group=f"g{number}", working_dir="/", dockerfile=dockerfile, working_dir_of_image=True)
            return await builder.completed(spec)

    started = time.perf_counter()
    specs = await asyncio.gather(*(one(number, dockerfile) for number, dockerfile in enumerate(found)))
    return time.perf_counter() - started, specs


async def _result(provider: SandboxProvider, spec: WorkspaceSpec, attempt: str) -> float:
    """Return the seconds from the request for a workspace to the result of its first command."""
    started = time.perf_counter()
    workspace = await provider.acquire(spec, attempt=attempt, fence=Fence(1, "benchmark"), name="agent")
    done = await workspace.run(["true"], key="0:true", deadline_seconds=60)
    seconds = time.perf_counter() - started
    assert done.ok
    await workspace.release()
    return seconds


def _buildah(found: list[Dockerfile], archive: str, folder: Path) -> tuple[float, float, float]:
    """Return (bytes of the layers over the base, seconds of all builds, median seconds of a container's first result).

    Layers are stored once for all images, and not compressed, as buildah keeps them on a node.
    """
    buildah = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def call(*arguments: str) -> str:
        done = subprocess.run([*buildah, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def build(number: int) -> None:
        context = folder / f"context-{number}"
        for file in found[number].context:
            path = context / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data())
        (context / "Dockerfile").write_text(found[number].text.replace("FROM base", f"FROM {BASE}"))
        call("build", "-q", "--isolation", "chroot", "--layers", "--pull-never", "-t", f"e{number}", str(context))

    try:
        call("tag", call("pull", "-q", f"docker-archive:{archive}"), BASE)
        before = _used(folder / "storage")
        started = time.perf_counter()
        with ThreadPoolExecutor(BUILDERS) as pool:
            list(pool.map(build, range(len(found))))
        seconds = time.perf_counter() - started
        used = _used(folder / "storage") - before
        starts = []
        for number in range(0, len(found), 10):
            began = time.perf_counter()
            call("run", "--isolation", "chroot", call("from", "--pull-never", f"e{number}"), "true")
            starts.append(time.perf_counter() - began)
        return used, seconds, quantile(starts, 0.5)
    finally:
        subprocess.run([*buildah, "rm", "--all"], capture_output=True, check=False)
        subprocess.run(["umount", "-q", str(folder / "storage/overlay")], check=False)


def _used(folder: Path) -> float:
    return (
        float(subprocess.run(["du", "-sxk", str(folder)], capture_output=True, text=True, check=True).stdout.split()[0])
        * 1024
    )
