"""Environments built from Dockerfiles, by this project and by buildah, to be compared file by file."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_runtime.builds.build import Builder, BuildOptions
from agent_runtime.builds.cache import BuildCache
from agent_runtime.recording.build_steps import BuildEntry
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, SandboxProvider, WorkspaceSpec
from rollout_api.files import ContextFile, Dockerfile
from rollout_api.sandbox import NetworkAccess, Phase, Resources

# Prints all properties of a root but times, inode numbers, and the link counts of folders. Left out are the parts of a
# workspace that do not come from its image.
DESCRIBE = """
import hashlib, json, os, stat, sys
os.chdir(sys.argv[1])
cut = {"./proc", "./sys", "./dev", "./tmp", "./run", "./etc/hosts", "./etc/hostname", "./etc/resolv.conf"}
found, links = {}, {}
for folder, folders, files in os.walk("."):
    folders[:] = sorted(name for name in folders if os.path.join(folder, name) not in cut)
    for name in [*folders, *sorted(files), "."]:
        path = os.path.normpath(os.path.join(folder, name))
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK) or "./" + path in cut or path == ".":
            continue
        same = links.setdefault(info.st_ino, path) if kind == stat.S_IFREG else path
        found[path] = [oct(info.st_mode), info.st_uid, info.st_gid, same]
        if kind == stat.S_IFLNK:
            found[path].append(os.readlink(path))
        elif kind != stat.S_IFIFO:
            names = [name for name in sorted(os.listxattr(path)) if ".overlay." not in name]
            found[path] += [[name, os.getxattr(path, name).hex()] for name in names]
        if kind == stat.S_IFREG:
            found[path].append(hashlib.sha256(open(path, "rb").read()).hexdigest())
json.dump(found, open(sys.argv[2], "w") if sys.argv[2:] else sys.stdout)
"""
Tree = Mapping[str, Any]


def dockerfile_of(folder: Path, seconds: int = 600) -> Dockerfile:
    """Return the Dockerfile in a folder, with the folder as its context."""
    context = [
        ContextFile(path=path.relative_to(folder).as_posix(), link=str(path.readlink()))
        if path.is_symlink()
        else ContextFile(
            path=path.relative_to(folder).as_posix(),
            content_base64=b64encode(path.read_bytes()).decode(),
            mode=f"{stat.S_IMODE(path.stat().st_mode):03o}",
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink()
    ]
    return Dockerfile(text=(folder / "Dockerfile").read_text(), context=context, seconds=seconds)


@dataclass
class Builds:
    """Builders that share a provider and a store in a folder of this machine."""

    provider: SandboxProvider
    output: Path
    bases: Mapping[str, str]
    arguments: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    steps: list[tuple[BuildEntry, bool]] = field(default_factory=list)
    """Steps of all builds, and whether each was stored before."""
    resources: Resources = Resources()
    network: Mapping[Phase, NetworkAccess] = field(default_factory=dict)
    count: int = 0

    @property
    def made(self) -> list[str]:
        """Return the instructions that were carried out since the last call."""
        found = [entry.step for entry, was_stored in self.steps if not was_stored]
        self.steps.clear()
        return found

    def builder(self) -> Builder:
        """Return a new builder, as a new process has."""
        store = Store.open(str(self.output), {})
        options = BuildOptions(
            bases=self.bases,
            arguments=self.arguments,
            secrets=self.secrets,
            on_step=lambda entry, was_stored: self.steps.append((entry, was_stored)),
        )
        return Builder(self.provider, BuildCache(store, store.below("run"), Layers(store, store.below("run"))), options)

    def spec(self, dockerfile: Dockerfile) -> WorkspaceSpec:
        self.count += 1
        return WorkspaceSpec(
            group=f"g{self.count}",
            working_dir="/",
            dockerfile=dockerfile,
            working_dir_of_image=True,
            network=self.network,
            resources=self.resources,
        )

    async def build(self, dockerfile: Dockerfile) -> WorkspaceSpec:
        """Build with a new builder; return the completed specification."""
        return await self.builder().completed(self.spec(dockerfile))

    async def output_of(
        self, spec: WorkspaceSpec, *command: str, user: str | None = "0:0", saved: str | None = None
    ) -> str:
        """Return what a command prints in a new workspace, or the file `saved` that it writes."""
        self.count += 1
        workspace = await self.provider.acquire(spec, attempt=f"{self.count}-0", fence=Fence(1, "test"), name="look")
        try:
            done = await workspace.run(list(command), key="0:run", deadline_seconds=300, user=user)
            assert done.ok, done
            return done.stdout.decode() if saved is None else (await workspace.read(saved, limit=1 << 30)).decode()
        finally:
            await workspace.release()

    async def tree(self, dockerfile: Dockerfile) -> Tree:
        """Build and return the files of a workspace."""
        spec = await self.build(dockerfile)
        found: Tree = json.loads(
            await self.output_of(spec, "python3", "-c", DESCRIBE, "/", "/tmp/seen", saved="/tmp/seen")
        )
        return found


def tree_of_buildah(buildah: Callable[..., str], folder: Path, *arguments: str) -> Tree:
    """Build with buildah and return the files of the image."""
    buildah(
        "build",
        "-q",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        "--pull-never",
        *arguments,
        "-t",
        "compared",
        str(folder),
    )
    container = buildah("from", "--pull-never", "compared")
    try:
        root = buildah("mount", container)
        done = subprocess.run([sys.executable, "-c", DESCRIBE, root], stdout=subprocess.PIPE, check=True)
        found: Tree = json.loads(done.stdout)
        return found
    finally:
        buildah("rm", container)


def differences(ours: Tree, theirs: Tree) -> dict[str, Any]:
    """Return (ours, theirs) of each path that differs."""
    return {
        path: (ours.get(path), theirs.get(path))
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
    }
