"""Docker or podman, through their command lines. The options used here are the same in both."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.images.files import ImageConfig
from rollout_api.base import quantity_value
from rollout_api.cluster import EXECUTOR_PATH, EXECUTOR_PORT, EXECUTOR_STATE

VARIABLE = "ROLLOUT_CONTAINER_ENGINE"
PROGRAMS = ("docker", "podman")
RUN_LABEL = "rollout.dev/run"
# Time limit of all calls except pulls, which take seconds, in case the daemon hangs.
CALL_SECONDS = 120.0
# In addition to the workspace: the executor, its zygote and inits take about 60 MiB and a few processes and threads.
EXECUTOR_MEMORY = 128 << 20
EXECUTOR_PROCESSES = 32
SOCKET_FOLDER = "/.rollout/socket"
# Capabilities for Overlay, as in a pod (docs/images.md). They apply within the user namespace that rootless podman
# creates.
OVERLAY_CAPABILITIES = (
    *("SYS_ADMIN", "SYS_CHROOT", "SETUID", "SETGID", "SETFCAP"),
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"),
)
# Capabilities that an image's root needs to install packages. They apply only to the container's own files and users.
PLAIN_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID")


@dataclass(frozen=True)
class Engine:
    """A working container engine."""

    program: str
    has_user_namespace: bool
    """Whether containers have a user namespace: their root has no rights on this machine, so `Overlay` can be used."""

    async def call(self, *arguments: str, seconds: float = CALL_SECONDS) -> str:
        """Return the output of `PROGRAM ARGUMENTS`. Raises SandboxFailure with its error output."""
        process = await asyncio.create_subprocess_exec(
            self.program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        what = f"{self.program} {arguments[0]}"
        try:
            async with asyncio.timeout(seconds):
                output, errors = await process.communicate()
        except TimeoutError:
            raise SandboxFailure(
                "ContainerEngine", f"{what} did not end within {seconds:g} s; check the engine"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise SandboxFailure("ContainerEngine", f"{what} failed: {errors.decode(errors='replace').strip()[-1000:]}")
        return output.decode(errors="replace").strip()

    async def image_config(self, image: str, *, seconds: float) -> ImageConfig:
        """Return an image's configuration; the image is pulled if missing, as with IfNotPresent in a cluster."""
        try:
            found = await self.call("image", "inspect", image)
        except SandboxFailure:
            await self.call("pull", "--quiet", image, seconds=seconds)
            found = await self.call("image", "inspect", image)
        config = json.loads(found)[0].get("Config") or {}
        return ImageConfig(env={}, user=config.get("User") or None, working_dir=config.get("WorkingDir") or None)


async def find_engine(environ: Mapping[str, str]) -> Engine:
    """Return the engine that ROLLOUT_CONTAINER_ENGINE names, or the first one that responds. Raises SandboxFailure."""
    wanted = environ.get(VARIABLE)
    said = []
    for program in (wanted,) if wanted else PROGRAMS:
        if shutil.which(program) is None:
            said.append(f"{program} is not installed")
            continue
        try:
            info = json.loads(await Engine(program, False).call("info", "--format", "{{json .}}"))
            if "ServerErrors" in info:
                raise SandboxFailure("ContainerEngine", "; ".join(info["ServerErrors"]))
            return Engine(program, bool(info.get("host", {}).get("security", {}).get("rootless")))
        except SandboxFailure as failure:
            said.append(failure.message)
    raise SandboxFailure(
        "ProviderUnavailable",
        f"sandbox.provider Container needs Docker or podman: {'; '.join(said)}. Start one of them, or name it in "
        f"{VARIABLE}, or use --provider Local",
    )


class EngineContainers:
    """Implements Containers. `bundle` is the executor's folder; `run` labels the containers of this run."""

    def __init__(self, engine: Engine, bundle: Path, run: str, *, mode: str) -> None:
        self._engine, self._bundle, self._run, self._mode = engine, bundle, run, mode

    async def start(self, container: str, spec: WorkspaceSpec, config: Mapping[str, Any], home: Path) -> str:
        assert spec.image is not None  # refused by the provider
        by_socket = sys.platform == "linux"
        sockets = home / "socket"
        sockets.mkdir()
        # The image's user creates its socket there; the parent folder is private.
        sockets.chmod(0o777)
        listen = f"unix:{SOCKET_FOLDER}/executor" if by_socket else f"tcp:0.0.0.0:{EXECUTOR_PORT}"
        told = {**config, "listen": listen, "stateDir": EXECUTOR_STATE}
        command = [
            *("run", "--detach", "--rm", "--pull", "never", "--name", container, "--label", f"{RUN_LABEL}={self._run}"),
            # With SELinux enforced, a container may not use files of the machine unless they are relabelled.
            *("--security-opt", "label=disable", "--entrypoint", f"{EXECUTOR_PATH}/executor"),
            *("--volume", f"{self._bundle}:{EXECUTOR_PATH}:ro"),
            *self._rights(spec),
            *limits(spec, self._mode),
            *network(spec, by_socket=by_socket),
            *(("--volume", f"{sockets}:{SOCKET_FOLDER}") if by_socket else ()),
        ]
        await self._engine.call(*command, spec.image, "--config-json", json.dumps(told))
        if by_socket:
            return f"unix:{sockets}/executor"
        published = await self._engine.call("port", container, f"{EXECUTOR_PORT}/tcp")
        return f"tcp:{published.splitlines()[0]}"

    def _rights(self, spec: WorkspaceSpec) -> Sequence[str]:
        if self._mode == "Overlay":
            added = [item for name in OVERLAY_CAPABILITIES for item in ("--cap-add", name)]
            # The engine's default seccomp and AppArmor profiles refuse mount even with the capabilities.
            lifted = ("--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined")
            return ["--user", "0", "--cap-drop", "ALL", *added, *lifted, "--volume", EXECUTOR_STATE]
        user = ["--user", spec.user] if spec.user else []
        state = f"type=tmpfs,destination={EXECUTOR_STATE},tmpfs-mode=1777"
        added = [item for name in PLAIN_CAPABILITIES for item in ("--cap-add", name)]
        return [*user, "--cap-drop", "ALL", *added, "--security-opt", "no-new-privileges", "--mount", state]

    async def remove(self, container: str) -> None:
        try:
            await self._engine.call("rm", "--force", "--volumes", container)
        except SandboxFailure:
            # Docker fails if the container does not exist or is already being removed.
            if container in await self._names():
                raise

    async def has_ended(self, container: str) -> bool:
        return container not in await self._names(running=True)

    async def log(self, container: str) -> str:
        return await self._engine.call("logs", "--tail", "20", container)

    async def remove_unrecorded(self, known: Sequence[str]) -> None:
        """Remove containers of this run without a record."""
        for container in await self._names():
            if container not in known:
                await self.remove(container)

    async def _names(self, *, running: bool = False) -> Sequence[str]:
        which = [] if running else ["--all"]
        ours = f"label={RUN_LABEL}={self._run}"
        listed = await self._engine.call("ps", *which, "--filter", ours, "--format", "{{.Names}}")
        return listed.split()


def limits(spec: WorkspaceSpec, mode: str) -> list[str]:
    """Return the workspace's limits that the engine enforces: all in `Plain`, none if workspaces share a container."""
    if mode == "Overlay":
        return []
    wanted, given = spec.resources, []
    if wanted.cpu is not None:
        given += ["--cpus", f"{quantity_value(wanted.cpu):g}"]
    if wanted.memory is not None:
        given += ["--memory", str(int(quantity_value(wanted.memory)) + EXECUTOR_MEMORY)]
    if wanted.processes is not None:
        given += ["--pids-limit", str(wanted.processes + EXECUTOR_PROCESSES)]
    return given


def wants_network(spec: WorkspaceSpec) -> bool:
    return any(access != "None" for access in spec.network.values())


def network(spec: WorkspaceSpec, *, by_socket: bool) -> list[str]:
    """Return network options: none without network access. Without a socket the executor needs a port, on the loopback
    only.
    """
    published = [] if by_socket else ["--publish", f"127.0.0.1::{EXECUTOR_PORT}"]
    return ["--network", "none"] if by_socket and not wants_network(spec) else published
