"""What providers have in common whose executors run in containers that somebody else starts: an engine, or kodo.

The executor's portable bundle on this machine: what a container of any image gets mounted, or copied into it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.container.executor import ContainerExecutors
from agent_runtime.sandboxes.hosting import HostedProvider, Hosting
from agent_runtime.sandboxes.images.files import ImageError
from agent_runtime.sandboxes.images.store import ImageStore
from rollout_api.sandbox import SandboxTemplate

VARIABLE = "ROLLOUT_EXECUTOR_IMAGE"
IMAGE = "agent-rollouts-executor"


def executor_bundle(store: ImageStore, environ: Mapping[str, str]) -> Path:
    """The folder with the launcher `executor` in it. Raises ImageError.

    It is the image that ROLLOUT_EXECUTOR_IMAGE names, a path or the name of one in a registry.
    """
    reference = environ.get(VARIABLE)
    if not reference:
        raise ImageError(
            f"{VARIABLE} is not set: it names the image {IMAGE} that is put into every container, as an archive "
            f"(`export {VARIABLE}=$(hack/images/build executor)`), or by its name in a registry"
        )
    image = store.unpack(reference)
    for layer in image.layers:
        if (layer / "executor").is_file() and (layer / "python").is_dir():
            return layer
    raise ImageError(f"{VARIABLE}={reference} is not the image {IMAGE}: there is no /executor in it")


class ContainerProviderBase(HostedProvider):
    """`run_dir` keeps the records by which the next process finds containers; `places` workspaces live at once; paths start
    at `base_dir`. Who derives from it sets `_executors` in `open`."""

    _executors: ContainerExecutors

    def __init__(
        self, run_dir: Path, template: SandboxTemplate, *, places: int, base_dir: Path = Path(),
        environ: Mapping[str, str] | None = None, images: ImageStore | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._records = run_dir / self.name
        self._template, self._places = template, places
        self._environ = os.environ if environ is None else environ
        self._images = images or ImageStore(base_dir)

    async def close(self, *, keep: bool = False) -> None:
        if self._pool is None:
            return
        await self._let_go()
        if not keep:
            await self._executors.remove_all()

    async def _find_bundle(self) -> Path:
        """The executor's bundle. Raises SandboxFailure."""
        try:
            return await asyncio.to_thread(executor_bundle, self._images, self._environ)
        except ImageError as error:
            raise SandboxFailure("ProviderUnavailable", str(error)) from error

    def _hosting_of(self, mode: str, **of_backend: str) -> Hosting:
        described = {
            "provider": self.name,
            "mode": mode,
            "modeReason": None if mode == "Overlay" else "a container has a workspace of its own",
            "root": "image",
            "imageUsed": True,
        }
        return Hosting(
            mode=mode,
            places=self._places,
            idle_seconds=self._template.idle_seconds,
            environment={},
            description=described | of_backend,
            provider=self.name,
        )
