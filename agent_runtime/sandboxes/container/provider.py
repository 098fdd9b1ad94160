"""Sandboxes in containers of Docker or podman on this machine.

`Overlay`, many workspaces in one container, needs an engine that gives containers a user namespace (rootless podman).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.container.engine import EngineContainers, find_engine, wants_network
from agent_runtime.sandboxes.container.executor import ContainerExecutors, ContainerProviderBase
from agent_runtime.sandboxes.hosting import Placement
from agent_runtime.sandboxes.images.files import ImageConfig
from agent_runtime.sandboxes.images.store import place_of
from rollout_api.sandbox import SandboxTemplate, WorkspaceMode


class ContainerProvider(ContainerProviderBase):
    """Implements SandboxProvider with Docker or podman."""

    name = "container"

    async def open(self) -> None:
        """Find the engine and the executor's bundle, and remove what a killed process has left. Raises SandboxFailure."""
        self._prepare()
        self._configs: dict[str, asyncio.Task[ImageConfig]] = {}
        self._engine = engine = await find_engine(self._environ)
        bundle = await self._find_bundle()
        mode = self._mode(engine.has_user_namespace, engine.program)
        run = hashlib.sha256(str(self._records).encode()).hexdigest()[:16]
        self._containers = EngineContainers(engine, bundle, run, mode=mode)
        executors = ContainerExecutors(self._records, self._containers, self._settings(mode, None))
        await executors.remove_dead()
        await self._containers.remove_unrecorded(executors.containers())
        self._executors = executors
        self._open_pool(self._container_hosting(mode, engine=engine.program), executors)
        self.warnings = warnings(self._template, mode)

    def _mode(self, has_user_namespace: bool, program: str) -> str:
        wanted = self._template.workspaces.mode
        if wanted is WorkspaceMode.OVERLAY and not has_user_namespace:
            raise SandboxFailure(
                "ProviderUnavailable",
                "sandbox.workspaces.mode Overlay needs an engine whose containers have a user namespace, such as "
                "rootless podman; "
                f"{program} here does not provide one. Set the mode to Auto or Plain, or run podman without root",
            )
        return "Overlay" if has_user_namespace and wanted is not WorkspaceMode.PLAIN else "Plain"

    def _settings(self, mode: str, config: ImageConfig | None) -> Callable[[WorkspaceSpec], Mapping[str, Any]]:
        # In Plain the executor runs as the container's user; in Overlay it is root and needs the user's name.
        user = {"user": config.user} if config is not None and config.user else {}

        def settings(spec: WorkspaceSpec) -> Mapping[str, Any]:
            places = self._places if mode == "Overlay" else 1
            return {"mode": mode, "places": places, "idleSeconds": self._template.idle_seconds, **user}

        return settings

    async def _described(self, spec: WorkspaceSpec) -> tuple[WorkspaceSpec, ImageConfig]:
        """Return the spec completed from its image. Raises SandboxFailure."""
        if spec.image is None:
            raise SandboxFailure(
                "ImageUnavailable",
                "sandbox.provider Container needs sandbox.image; name an image, or use --provider Local",
            )
        if place_of(spec.image, Path()) is not None:
            raise SandboxFailure(
                "ImageUnavailable",
                f"sandbox.image {spec.image} is a path, which only --provider Local supports; load it into "
                f"{self._engine.program} (`{self._engine.program} load -i FILE`) and give its name",
            )
        task = self._configs.get(spec.image)
        if task is None:
            inspection = self._engine.image_config(spec.image, seconds=spec.start_seconds)
            task = self._configs[spec.image] = asyncio.create_task(inspection)
        try:
            config = await asyncio.shield(task)
        except SandboxFailure:
            self._configs.pop(spec.image, None)
            raise
        if spec.working_dir_of_image and config.working_dir:
            spec = dataclasses.replace(spec, working_dir=config.working_dir)
        return spec, config

    async def _placed(self, spec: WorkspaceSpec) -> Placement:
        spec, config = await self._described(spec)
        hosting, executors = self._found
        if hosting.mode == "Plain":
            return Placement(spec, "", hosting, executors)
        executors = ContainerExecutors(self._records, self._containers, self._settings("Overlay", config))
        return Placement(spec, sandbox_key(spec), hosting, executors)


def sandbox_key(spec: WorkspaceSpec) -> str:
    """Return a name for the container that workspaces of a spec can share: its image, and whether it has a network."""
    return f"image-{hashlib.sha256(f'{spec.image} {wants_network(spec)}'.encode()).hexdigest()[:24]}"


def warnings(template: SandboxTemplate, mode: str) -> list[str]:
    found = []
    phases = template.network.by_phase().values()
    if mode == "Plain" and any(phase != "None" for phase in phases):
        found.append(
            "sandbox.network is not enforced: a container with a network in one phase has the engine's network "
            "in all phases"
        )
    if mode == "Overlay" and template.resources.cpu is not None:
        found.append(
            f"sandbox.resources.cpu {template.resources.cpu} is not enforced: workspaces share their container's cores"
        )
    return found
