"""Workspaces in which steps are made, and facts about base images."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Mapping
from typing import Any

from agent_runtime.builds.keys import Base
from agent_runtime.builds.step_files import ROOT
from agent_runtime.sandboxes.base import (
    Fence,
    FileError,
    SandboxFailure,
    SandboxProvider,
    StoredLayer,
    Workspace,
    WorkspaceSpec,
)

# Files that tell one state of a tag from another, where the image's digest is unknown.
_IDENTIFYING = ("/etc/os-release", "/etc/passwd", "/var/lib/dpkg/status", "/lib/apk/db/installed")
_IDENTIFYING_BYTES = 64 << 20
_PROBE = "/tmp/.probe"


class BuildWorkspaces:
    """The workspaces of one run's builds, on a machine of that architecture.

    `label` begins their names, and differs for each runner of a job.
    """

    def __init__(self, provider: SandboxProvider, label: str, machine: str) -> None:
        self._provider, self._label, self._machine = provider, label, machine

    @contextlib.asynccontextmanager
    async def bare(
        self,
        image: str | None,
        layers: tuple[StoredLayer, ...],
        spec: WorkspaceSpec,
        name: str,
        user: str | None = ROOT,
    ) -> AsyncIterator[Workspace]:
        """A workspace of an image with these layers, with the limits of builds and without the task's settings."""
        wanted = WorkspaceSpec(
            group=f"{self._label}-{secrets.token_hex(6)}",
            working_dir="/",
            image=image,
            layers=layers,
            user=user,
            # Of the same kind as the task's own workspace, so that both can be in one sandbox of a cluster.
            resources=spec.resources,
            network=spec.network,
            is_build=True,
            is_single=True,
            alone=spec.alone,
            start_seconds=spec.start_seconds,
            working_dir_of_image=True,
        )
        async with self._acquired(wanted, name) as workspace:
            if workspace.description.get("mode") == "Plain":
                raise _unsupported(spec, workspace.description)
            yield workspace

    @contextlib.asynccontextmanager
    async def prepared(self, spec: WorkspaceSpec, name: str) -> AsyncIterator[Workspace]:
        """A workspace in a task's prepared state. Its group has the `name`, so that after a crash the next builder
        continues the preparation. It is alone in its sandbox if the task's workspace will be: others there may have been
        why an earlier preparation was lost.
        """
        group = f"{self._label}-{name[:12]}"
        wanted = dataclasses.replace(spec, group=group, is_single=True, stores_setup=False)
        async with self._acquired(wanted, "setup") as workspace:
            yield workspace

    @contextlib.asynccontextmanager
    async def _acquired(self, wanted: WorkspaceSpec, name: str) -> AsyncIterator[Workspace]:
        token = secrets.token_hex(6)
        try:
            workspace = await self._provider.acquire(
                wanted, attempt=f"{self._label}-{token}", fence=Fence(1, token), name=name
            )
            try:
                yield workspace
            finally:
                await workspace.release()
        finally:
            # Also if its setup failed: otherwise its sandbox waits for further workspaces of the group.
            await self._provider.forget_group(wanted.group)

    async def read_base(self, image: str | None, spec: WorkspaceSpec) -> Base:
        """Return facts about an image, for a task that starts from it. Raises SandboxFailure."""
        async with self.bare(image, (), spec, "base", user=None) as workspace:
            digest = workspace.description.get("imageDigest")
            identity = str(digest or "")
            for path in () if digest else _IDENTIFYING:
                with contextlib.suppress(FileError):
                    content = await workspace.read(path, limit=_IDENTIFYING_BYTES)
                    identity += f" {hashlib.sha256(content).hexdigest()}"
            uid, gid = await _user_of(workspace)
            has_one_user = False
            try:
                await workspace.write(_PROBE, b"", key="1:owner", replace=True, owner="1:1")
            except FileError:
                has_one_user = True
            told = await workspace.run(["/usr/bin/env", "-0"], key="1:env", deadline_seconds=60, env={})
            found = (entry.partition("=") for entry in told.stdout.decode(errors="replace").split("\0") if entry)
            env = {
                name: value for name, _, value in found if name not in ("HOME", "PWD", "SHLVL", "_", "USER", "LOGNAME")
            }
            user = f"{uid}:{gid}" if (uid, gid) != (0, 0) else None
            # Layers of another machine, or without owners, would be wrong here.
            identity += f" {self._machine}" + (" one-user" if has_one_user else "")
            return Base(identity, env, workspace.working_dir, user, has_one_user)


def _unsupported(spec: WorkspaceSpec, description: Mapping[str, Any]) -> SandboxFailure:
    """Return the failure of a task that needs layers, in a sandbox in `Plain`."""
    reason = description.get("modeReason") or "sandbox.workspaces.mode is Plain"
    needed = f"needs workspaces in Overlay mode, and here they are Plain: {reason}"
    if spec.dockerfile is not None:
        return SandboxFailure("DockerfileUnsupported", f"a Dockerfile is built in layers, which {needed}")
    return SandboxFailure(
        "StoreSetupUnsupported", f"sandbox.storeSetup keeps a layer, which {needed}; leave out sandbox.storeSetup"
    )


async def _user_of(workspace: Workspace) -> tuple[int, int]:
    """Return uid and gid of the workspace's user, without a program of the image."""
    await workspace.write(_PROBE, b"", key="1:user", replace=True)
    content = b"".join([chunk async for chunk in workspace.tar(_PROBE)])
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = tar.next()
    assert member is not None  # the file was written above
    return member.uid, member.gid
