"""Replaces the kodo package where that is not installed: the same signatures, with podman's command line.

The signatures of https://github.com/baidubce/kodo, kodo/core.py, are in `kodo_signatures.json`, and a test compares
them.
"""

import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any


def stand_in() -> None:
    """Replace the package in this process, unless the real one is installed."""
    if "kodo" not in sys.modules and importlib.util.find_spec("kodo") is None:
        sys.modules["kodo"] = sys.modules[__name__]


class NotFound(Exception):
    """Like that of the docker package."""

    status_code = 404


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise (NotFound if re.search("no such container|image not known", done.stderr) else RuntimeError)(done.stderr)
    return done.stdout


def image(name: str) -> Any:
    found = json.loads(podman("image", "inspect", name))[0]
    return SimpleNamespace(attrs={"Config": found["Config"]})


def pull(name: str) -> Any:
    podman("pull", "--quiet", name)
    return image(name)


class Container:
    """The used part of a container of the docker package."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = json.loads(podman("container", "inspect", name))[0]
        self.status = str(found["State"]["Status"])
        ports = {port: bound or [] for port, bound in found["NetworkSettings"]["Ports"].items()}
        self.attrs = {"NetworkSettings": {"Ports": ports}}

    def remove(self, **kwargs: Any) -> None:
        podman("rm", *(["--force"] if kwargs.get("force") else []), self.name)

    def logs(self, **kwargs: Any) -> bytes:
        return podman("logs", "--tail", str(kwargs["tail"]), self.name).encode()


class DockerManager:
    def __init__(self, timeout: int = 120) -> None:
        self.client = SimpleNamespace(
            containers=SimpleNamespace(get=Container), images=SimpleNamespace(get=image, pull=pull)
        )
        self.containers: dict[str, Any] = {}

    def start_container(
        self,
        image: str,
        command: str = "/bin/bash",
        name: str | None = None,
        environment: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Any:
        assert name is not None
        (port,) = kwargs.pop("ports")
        known = {
            "auto_remove",
            "cap_add",
            "cap_drop",
            "entrypoint",
            "security_opt",
            "mem_limit",
            "nano_cpus",
            "pids_limit",
        }
        assert set(kwargs) <= known, kwargs
        rights = [f"--cap-drop={name}" for name in kwargs["cap_drop"]] + [
            f"--cap-add={name}" for name in kwargs["cap_add"]
        ]
        variables = {"PATH": "/root/.venv/bin:/usr/bin:/bin", **(environment or {})}
        rights += [f"--env={name}={value}" for name, value in variables.items()]
        entry = ["--entrypoint", json.dumps(kwargs["entrypoint"]), "--publish", f"127.0.0.1::{port}"]
        podman("run", "--detach", "--rm", "--pull=never", "--name", name, *rights, *entry, image, *command)
        return Container(name)

    def execute_command(
        self, container: Any, command: str, timeout: int = 300, workdir: str | None = None
    ) -> tuple[str, str]:
        try:
            return podman("exec", container.name, "/bin/sh", "-c", command), "0"
        except RuntimeError as error:
            return str(error), "Error: Exit code 1"

    def copy_to_container(self, container: Any, src_path: str, dest_path: str) -> None:
        podman("cp", f"{src_path}/.", f"{container.name}:{dest_path}")

    def stop_container(self, container_name: str) -> None:
        podman("rm", "--force", container_name)


class ContainerRunner:
    def __init__(self, backend: str = "docker", **kwargs: Any) -> None:
        assert backend == "docker", "the double has no cluster"
        self.backend, self.manager = backend, DockerManager(**kwargs)

    def start_container(self, image: str, name: str | None = None, **kwargs: Any) -> Any:
        return self.manager.start_container(image, name=name, **kwargs)

    def execute_command(self, container_ref: Any, command: str, **kwargs: Any) -> tuple[str, str]:
        return self.manager.execute_command(container_ref, command, **kwargs)

    def copy_to_container(self, container_ref: Any, src_path: str, dest_path: str) -> None:
        self.manager.copy_to_container(container_ref, src_path, dest_path)

    def stop_container(self, container_ref: Any) -> None:
        self.manager.stop_container(getattr(container_ref, "name", container_ref))
