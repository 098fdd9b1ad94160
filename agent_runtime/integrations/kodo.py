"""Sandboxes in containers or pods that the kodo package starts (https://github.com/baidubce/kodo, 1.0.0; extra `kodo`).

kodo starts a container of the task's image, copies files into it and runs commands in it. This provider starts a
container whose command waits for the executor's bundle and then executes it; all further requests go to the executor
over HTTP, as with other providers. kodo's status is not used: a container is ready when its executor answers, and has
ended when it cannot be found. Calls of kodo may hang, so each has a time limit here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent_runtime.daemon_thread import in_daemon_thread
from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.container.engine import EXECUTOR_MEMORY, EXECUTOR_PROCESSES, PLAIN_CAPABILITIES
from agent_runtime.sandboxes.container.executor import ContainerExecutors, ContainerProviderBase
from agent_runtime.sandboxes.hosting import Placement
from rollout_api.base import quantity_value
from rollout_api.sandbox import Kodo, KodoBackend

# Time limit of calls to kodo, which take seconds, or longer to copy 16 MB through an API server.
CALL_SECONDS = 120.0
# How long to wait for a copy before the next attempt: kodo's call ends before all data has arrived, and sometimes
# truncates it.
ARRIVAL_SECONDS = 10.0
ARRIVAL_POLL_SECONDS = 0.2
FOLDER = "/tmp/.rollout"
# Name of the file that is last in the copied tar. When it exists, the copy is complete.
LAST = "whole"
# Ports for the executor: above usual service ports, below ephemeral ports.
PORTS = range(20_000, 30_000)
# Executes the executor when the bundle has arrived, and exits if it does not arrive. Without the trap, PID 1 ignores
# SIGTERM.
WAIT_FOR_EXECUTOR = (
    "trap 'exit 1' TERM; mkdir -p {folder}; n=0; until [ -e {folder}/{last} ]; do "
    "n=$((n+1)); [ $n -gt {rounds} ] && exit 1; sleep 0.2 2>/dev/null || sleep 1; done; "
    "exec {folder}/executor --config {folder}/config.json"
)


def import_kodo() -> Any:
    """Import the kodo package. Raises SandboxFailure that says how to install it."""
    try:
        return importlib.import_module("kodo")
    except ImportError as error:
        raise SandboxFailure(
            "ProviderUnavailable",
            f"sandbox.provider Kodo needs the package kodo, which is not installed ({error}); it is not on a "
            "package index: "
            "`pip install git+https://github.com/baidubce/kodo` and `pip install 'agent-rollouts[kodo]'`",
        ) from error


async def call(what: str, seconds: float, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `function(...)` in a thread that is abandoned if it does not end in time. Raises SandboxFailure."""
    try:
        work = functools.partial(function, *arguments, **options)
        return await asyncio.wait_for(in_daemon_thread(f"kodo {what}", work), seconds)
    except TimeoutError:
        raise SandboxFailure("Kodo", f"kodo did not {what} in {seconds:g} s") from None
    except Exception as error:
        failure = ContainerNotFound if status_of(error) == 404 else SandboxFailure
        raise failure("Kodo", f"kodo could not {what}: {type(error).__name__}: {str(error)[:1000]}") from error


class ContainerNotFound(SandboxFailure):
    """The requested object does not exist."""


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error of the docker or kubernetes package."""
    for name in ("status_code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status
    return None


class KodoContainers:
    """Implements Containers. `runner` is a kodo.ContainerRunner."""

    def __init__(self, runner: Any, settings: Kodo, bundle: Path) -> None:
        self._runner, self._settings, self._bundle = runner, settings, bundle

    async def start(self, container: str, spec: WorkspaceSpec, config: Mapping[str, Any], home: Path) -> str:
        port = random.choice(PORTS)
        upload = home / "upload"
        await asyncio.to_thread(shutil.copytree, self._bundle, upload)
        upload.chmod(0o755)
        told = {**config, "listen": f"tcp:0.0.0.0:{port}", "stateDir": FOLDER}
        (upload / "config.json").write_text(json.dumps(told))
        (upload / LAST).touch()
        script = WAIT_FOR_EXECUTOR.format(folder=FOLDER, last=LAST, rounds=int(spec.start_seconds * 5))
        if self._is_docker:
            options = self._docker(spec, script, port)
            options["environment"] = await self._search_path(str(spec.image), spec.start_seconds)
        else:
            options = self._kubernetes(spec, script)
        reference = await call(
            "start a container", spec.start_seconds, self._runner.start_container, spec.image, name=container, **options
        )
        address = await self._address(container, port)
        with contextlib.suppress(ContainerNotFound):  # The executor has ended, which the caller reports.
            await self._copy(reference if self._is_docker else container, upload)
        shutil.rmtree(upload)
        return address

    @property
    def _is_docker(self) -> bool:
        return self._settings.backend is KodoBackend.DOCKER

    def _docker(self, spec: WorkspaceSpec, script: str, port: int) -> dict[str, Any]:
        """Return options that kodo passes to docker's `containers.run`."""
        wanted = spec.resources
        limits: dict[str, Any] = {}
        if wanted.cpu is not None:
            limits["nano_cpus"] = int(quantity_value(wanted.cpu) * 10**9)
        if wanted.memory is not None:
            limits["mem_limit"] = int(quantity_value(wanted.memory)) + EXECUTOR_MEMORY
        if wanted.processes is not None:
            limits["pids_limit"] = wanted.processes + EXECUTOR_PROCESSES
        return {
            "entrypoint": ["/bin/sh", "-c"],
            "command": [script],
            "ports": {f"{port}/tcp": ("127.0.0.1", None)},
            "auto_remove": True,
            "cap_drop": ["ALL"],
            "cap_add": list(PLAIN_CAPABILITIES),
            "security_opt": ["no-new-privileges"],
            **limits,
        }

    async def _search_path(self, image: str, seconds: float) -> dict[str, str]:
        """Return the image's PATH, which kodo would replace."""
        images = self._runner.manager.client.images
        try:
            found = await call(f"find image {image}", CALL_SECONDS, images.get, image)
        except ContainerNotFound:
            found = await call(f"pull image {image}", seconds, images.pull, image)
        variables = (variable.partition("=") for variable in found.attrs["Config"].get("Env") or ())
        return {name: value for name, _, value in variables if name == "PATH"}

    def _kubernetes(self, spec: WorkspaceSpec, script: str) -> dict[str, Any]:
        wanted = {
            name: quantity
            for name, quantity in (("cpu", spec.resources.cpu), ("memory", spec.resources.memory))
            if quantity is not None
        }
        return {
            "command": script,
            "node_selector": dict(self._settings.node_selector) or None,
            "timeout": int(spec.start_seconds),
            **({"resources": {"requests": wanted, "limits": wanted}} if wanted else {}),
        }

    async def _copy(self, reference: Any, upload: Path) -> None:
        """Copy until everything has arrived; the caller sets the deadline."""
        while True:
            await call("copy files", CALL_SECONDS, self._runner.copy_to_container, reference, str(upload), FOLDER)
            clock = asyncio.get_running_loop()
            until = clock.time() + ARRIVAL_SECONDS
            while clock.time() < until:
                command = f"[ -e {FOLDER}/{LAST} ] && echo arrived"
                said, _ = await call("run a command", CALL_SECONDS, self._runner.execute_command, reference, command)
                if "arrived" in said:
                    return
                await asyncio.sleep(ARRIVAL_POLL_SECONDS)

    async def _address(self, container: str, port: int) -> str:
        found = await self._find(container)
        if self._is_docker:
            return f"tcp:127.0.0.1:{found.attrs['NetworkSettings']['Ports'][f'{port}/tcp'][0]['HostPort']}"
        return f"tcp:{found.status.pod_ip}:{port}"

    async def _find(self, container: str) -> Any:
        """Return the container or pod. Raises ContainerNotFound."""
        client = self._runner.manager.client
        if self._is_docker:
            return await call("find a container", CALL_SECONDS, client.containers.get, container)
        read, namespace = client.read_namespaced_pod, self._settings.namespace
        return await call("find a pod", CALL_SECONDS, read, name=container, namespace=namespace)

    async def remove(self, container: str) -> None:
        """See Containers. kodo itself only removes containers that the same process has started."""
        try:
            if not self._is_docker:
                await call("delete a pod", CALL_SECONDS, self._runner.stop_container, container)
                return
            found = await self._find(container)
            await call("remove a container", CALL_SECONDS, found.remove, force=True)
        except ContainerNotFound:
            return

    async def has_ended(self, container: str) -> bool:
        try:
            found = await self._find(container)
        except ContainerNotFound:
            return True
        if self._is_docker:
            return found.status in ("exited", "dead", "removing")
        return found.status.phase in ("Succeeded", "Failed")

    async def log(self, container: str) -> str:
        if self._is_docker:
            said: bytes = await call("read a log", CALL_SECONDS, (await self._find(container)).logs, tail=20)
            return said.decode(errors="replace")
        read, namespace = self._runner.manager.client.read_namespaced_pod_log, self._settings.namespace
        return str(await call("read a log", CALL_SECONDS, read, name=container, namespace=namespace, tail_lines=20))


class KodoProvider(ContainerProviderBase):
    """Implements SandboxProvider with the kodo package, one container for each workspace."""

    name = "kodo"

    async def open(self) -> None:
        """Import kodo, connect to its backend, and remove what a killed process has left. Raises SandboxFailure."""
        self._prepare()
        kodo, settings = import_kodo(), self._template.kodo
        bundle = await self._find_bundle()
        if settings.backend is KodoBackend.DOCKER:
            options: dict[str, Any] = {"backend": "docker"}
        else:
            # With disable_proxy, kodo would remove the proxy variables from this process's environment during each
            # call.
            options = {"backend": "kubernetes", "namespace": settings.namespace, "disable_proxy": False}
        runner = await call("reach its backend", CALL_SECONDS, kodo.ContainerRunner, **options)
        containers = KodoContainers(runner, settings, bundle)
        executors = ContainerExecutors(self._records, containers, self._settings)
        await executors.remove_dead()
        self._executors = executors
        self._open_pool(self._container_hosting("Plain", backend=settings.backend.value), executors)
        self.warnings = [
            "sandbox.network is not enforced: containers of kodo have their backend's network in all phases",
            *(
                ["PATH of commands is kodo's own, not the image's"]
                if settings.backend is KodoBackend.KUBERNETES
                else []
            ),
            "sandbox.runtimeClassName and sandbox.podTemplate are not used: kodo creates the containers",
        ]

    def _settings(self, spec: WorkspaceSpec) -> Mapping[str, Any]:
        return {"mode": "Plain", "places": 1, "idleSeconds": self._template.idle_seconds}

    async def _placed(self, spec: WorkspaceSpec) -> Placement:
        if spec.image is None:
            raise SandboxFailure("ImageUnavailable", "sandbox.provider Kodo needs sandbox.image; name an image")
        return Placement(spec, "", *self._found)
