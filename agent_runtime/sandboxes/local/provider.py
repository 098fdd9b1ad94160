"""Sandboxes on this machine, without containers or a cluster.

In `Overlay` a workspace is a copy-on-write view of an image's unpacked layers, or of this machine's root. In `Plain` it
is a temporary folder: no image is used, and attempts are not isolated otherwise, which `warnings` reports.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pwd
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.hosting import Placement
from agent_runtime.sandboxes.images.files import STANDARD_PATH, ImageError
from agent_runtime.sandboxes.images.store import ImageStore, UnpackedImage
from agent_runtime.sandboxes.local.environment import (
    PythonEnvironment,
    binds,
    choose_search_path,
    masked_paths,
    may_enter,
    people_homes,
    readable_by,
    running_environment,
)
from agent_runtime.sandboxes.local.executor import LocalExecutors
from agent_runtime.sandboxes.recorded import RecordedProvider
from rollout_api.sandbox import SandboxTemplate

SHARED = "shared"
# User of commands in `Plain` if root started the run: as root they would have all rights on the machine.
PLAIN_USER = "nobody"
# The image of the starter and the examples for clusters. On a laptop, the machine's Python and pytest are used instead.
MACHINE_IMAGE = "agent-rollouts-quickstart"
MACHINE: dict[str, Any] = {"root": "host:/", "imageUsed": False}
"""Image name in the description of a workspace that uses this machine's root."""


class LocalProvider(RecordedProvider):
    """Implements SandboxProvider on this machine.

    `private` are further files and folders, besides `run_dir`, that no workspace may see, such as the job's output.
    """

    name = "local"
    shares_memory = True

    def __init__(
        self,
        run_dir: Path,
        template: SandboxTemplate,
        *,
        places: int,
        private: Sequence[Path] = (),
        base_dir: Path = Path(),
        images: ImageStore | None = None,
    ) -> None:
        super().__init__(run_dir, template, places=places, folder="sandboxes", base_dir=base_dir, images=images)
        self._private = (run_dir, *private)
        self._unpacked: dict[str, asyncio.Task[UnpackedImage]] = {}

    async def open(self) -> None:
        """Find the run's executor, or start one, which determines the mode. Raises SandboxFailure."""
        self._prepare()
        # Mask the temporary folder, which has sandboxes of other runs and may not be /tmp.
        masks = masked_paths((*self._private, Path(tempfile.gettempdir())), people_homes())
        python = running_environment()
        machine = self._executors = LocalExecutors(
            self._records, partial(self._of_machine, masks), self._template.start_seconds
        )
        executor = await machine.find(SHARED) or await machine.start(SHARED, WorkspaceSpec("trial", "/"))
        try:
            if executor.mode == "Overlay":
                guarantees = (await executor.client.health())["guarantees"]
                await executor.client.close()
                image = await self._image(self._template.image, self._template.start_seconds)
                path, path_reason = await choose_search_path(python, masks, os.environ)
                hosting = self._hosting("Overlay", None, {"PATH": path}, **MACHINE, pathReason=path_reason)
                self.warnings = [
                    *common_warnings(self._template),
                    *overlay_warnings(guarantees),
                    *image_warnings(self._template.image, used=image),
                    *(path_warnings(python, path, path_reason) if image is None else []),
                ]
                self._open_pool(hosting, machine)
                return
            # Plain has an executor for each workspace, so stop the one that tested the mode.
            uid = plain_uid(self._template.user)
            is_reachable = readable_by(python, uid)
            path, path_reason = await choose_search_path(python if is_reachable else None, [], os.environ)
            reason = executor.record.mode_reason
            hosting = self._hosting("Plain", reason, {"PATH": path}, **MACHINE, pathReason=path_reason)
            self.warnings = [
                *common_warnings(self._template),
                *plain_warnings(reason, is_reachable),
                *image_warnings(self._template.image, used=None),
                *path_warnings(python, path, path_reason),
            ]
            self._open_pool(hosting, LocalExecutors(self._records, self._of_plain, None, _plain_homes(uid)))
        finally:
            if self._pool is None or self._found[0].mode == "Plain":
                await executor.stop()

    async def _image(self, reference: str | None, seconds: float) -> UnpackedImage | None:
        """Return the image of that name, unpacked once; None if this machine's root is used instead. Raises
        SandboxFailure.
        """
        if reference is None or (reference.partition(":")[0] == MACHINE_IMAGE and not self._images.has(reference)):
            return None
        task = self._unpacked.get(reference)
        if task is None:
            task = self._unpacked[reference] = asyncio.create_task(asyncio.to_thread(self._images.unpack, reference))
        try:
            return await asyncio.wait_for(asyncio.shield(task), seconds)
        except TimeoutError as error:
            raise SandboxFailure(
                "ImageUnavailable",
                f"image {reference} was not there after {seconds:g} s (sandbox.startSeconds); it is still being "
                "downloaded",
            ) from error
        except ImageError as error:
            self._unpacked.pop(reference, None)
            raise SandboxFailure("ImageUnavailable", str(error)) from error

    async def _placed(self, spec: WorkspaceSpec) -> Placement:
        is_plain = self._found[0].mode == "Plain"
        image = None if is_plain else await self._image(spec.image, spec.start_seconds)
        if image is None:
            return Placement(spec, SHARED, *self._found)
        folder = image.config.working_dir or "/"
        if spec.working_dir_of_image and folder != "/":
            spec = dataclasses.replace(spec, working_dir=folder)
        hosting = self._hosting(
            "Overlay",
            None,
            {"PATH": ":".join(STANDARD_PATH), **image.config.env},
            root="image",
            imageUsed=True,
            imageDigest=image.digest,
            pathReason="the image's own",
        )
        executors = LocalExecutors(self._records, partial(self._of_image, image), self._template.start_seconds)
        return Placement(spec, f"image-{image.key}", hosting, executors)

    # Keys of executors' configurations, by purpose.

    def _of_machine(self, masks: Sequence[str], home: Path, spec: WorkspaceSpec) -> Mapping[str, Any]:
        """Return hosting for workspaces that see this machine; if the trial of `Overlay` fails, they are `Plain`."""
        return {
            "mode": self._template.workspaces.mode.value,
            "places": self._places,
            "masks": [*masks, str(home)],
            "binds": binds(running_environment()),
            "idleSeconds": self._template.idle_seconds,
        }

    def _of_image(self, image: UnpackedImage, home: Path, spec: WorkspaceSpec) -> Mapping[str, Any]:
        # Without root, a workspace has a single user.
        user = {"user": image.config.user} if image.config.user and os.geteuid() == 0 else {}
        return {
            "mode": "Overlay",
            "places": self._places,
            "rootLayers": [str(layer) for layer in image.layers],
            "idleSeconds": self._template.idle_seconds,
            **user,
        }

    def _of_plain(self, home: Path, spec: WorkspaceSpec) -> Mapping[str, Any]:
        """Return hosting for one workspace, whose root is a folder in the executor's home."""
        uid = plain_uid(spec.user)
        root = home / "root"
        root.mkdir(mode=0o755)
        user = spec.user or (PLAIN_USER if os.geteuid() == 0 else None)
        if os.geteuid() == 0:
            os.chown(root, uid, -1)
        return {"mode": "Plain", "root": str(root), "user": user, "idleSeconds": self._template.idle_seconds}


def _plain_homes(uid: int) -> str:
    """Return a temporary folder for workspaces that commands of that user can enter: root's TMPDIR may be accessible
    only to root.
    """
    if uid == os.geteuid():  # `may_enter` does not consider groups and access lists
        return tempfile.gettempdir()
    folders = (tempfile.gettempdir(), "/var/tmp", "/tmp")
    found = next((folder for folder in folders if os.path.isdir(folder) and may_enter(folder, uid)), None)
    if found is None:
        raise SandboxFailure(
            "ProviderUnavailable",
            f"none of {', '.join(folders)} can be entered by uid {uid}, the user of commands in Plain mode; set TMPDIR "
            "to a folder that this user can enter",
        )
    return found


def plain_uid(user: str | None) -> int:
    """Return the uid of commands in `Plain`. Raises SandboxFailure for an unknown user, or one that this process may
    not become.
    """
    if user is None:
        return pwd.getpwnam(PLAIN_USER).pw_uid if os.geteuid() == 0 else os.geteuid()
    name = user.partition(":")[0]
    try:
        uid = int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise SandboxFailure(
            "ProviderUnavailable", f"sandbox.user {name!r} is not a user of this machine; give one that is, or a uid"
        ) from error
    if os.geteuid() not in (0, uid):
        raise SandboxFailure(
            "ProviderUnavailable",
            f"sandbox.user {user!r}: in Plain mode commands run as the user of rolloutctl, uid {os.geteuid()}; leave "
            "user out, or run as root",
        )
    return uid


def image_warnings(name: str | None, *, used: UnpackedImage | None) -> list[str]:
    """Return what replaces an image, or which parts of it are unavailable."""
    if used is not None:
        lost = "owners of files and the image's user are ignored: without root, a workspace has a single user, root"
        return [] if os.geteuid() == 0 else [lost]
    why = f"image {name} is not used" if name else "sandbox.image is not set"
    others = "tasks" if name else "tasks without an image or Dockerfile of their own"
    return [f"{why}: {others} see this machine's programs and files"]


def path_warnings(environment: PythonEnvironment, path: str, reason: str) -> list[str]:
    """Return a warning if the environment of rolloutctl comes first on PATH."""
    return [f"PATH of commands: {reason}"] if path.split(":")[0] == environment.bin else []


def common_warnings(template: SandboxTemplate) -> list[str]:
    warnings = []
    if template.resources.cpu is not None:
        warnings.append(f"sandbox.resources.cpu {template.resources.cpu} is not enforced: commands share all cores")
    return warnings


def overlay_warnings(guarantees: Mapping[str, str]) -> list[str]:
    """Return what the executor cannot enforce here, besides cpu."""
    return [
        f"{what} is not enforced: {why.removeprefix('None: ')}"
        for what, why in guarantees.items()
        if why.startswith("None") and what != "cpu"
    ]


def plain_warnings(reason: str | None, python_reachable: bool) -> list[str]:
    """Return what `Plain` does not isolate."""
    because = f" ({reason})" if reason else ""
    warnings = [
        "commands run in Plain mode: they see this machine's files, processes and network as their user does, and only "
        f"folders separate attempts{because}"
    ]
    if not python_reachable:
        warnings.append(
            f"user {PLAIN_USER} cannot read the Python environment of rolloutctl, so it is not on the commands' PATH"
        )
    return warnings
