"""The configuration of `python -m agent_runtime.executor`: one JSON object; docs/executor.md has its keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent_runtime.executor.http.fields import Fields
from agent_runtime.executor.overlay.config import MODES, REST_SECONDS, Bind, HostConfig

_ABSOLUTE = r"/[^\0]*"
# Variables that the kubelet and the container runtime add to a container's environment: the API server's address, and
# the pod's host name, which is not the workspace's.
_RUNTIME_VARIABLES = ("KUBERNETES_", "HOSTNAME=")
_ADDRESS = r"unix:[^\0]{1,100}|tcp:(\[[0-9A-Fa-f:.]+\]|[^:\0]*):[0-9]{1,5}"


@dataclass(frozen=True)
class ExecutorConfig:
    """The executor's configuration. `ready_file`, `remove_at_end` and `runner_locks` are optional."""

    listen: str
    token_sha256: str
    host: HostConfig
    idle_seconds: float
    ready_file: str | None
    remove_at_end: str | None
    runner_locks: str | None


def image_environment(variables: Iterable[str]) -> dict[str, str]:
    """Return those of a container's variables, given as `NAME=VALUE`, that commands get."""
    return {
        name: value
        for name, equals, value in (variable.partition("=") for variable in variables)
        if name and equals and not f"{name}=".startswith(_RUNTIME_VARIABLES)
    }


def read_config(text: str, environment: Mapping[str, str] = MappingProxyType({})) -> ExecutorConfig:
    """Parse the configuration from JSON text; `environment` is for every command. Raises ValueError that names the key."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"config: one JSON object expected ({error})") from None
    fields = Fields(value, "config", ValueError)
    path = {"pattern": _ABSOLUTE, "expected": "an absolute path"}
    config = ExecutorConfig(
        listen=fields.text("listen", pattern=_ADDRESS, expected="unix:PATH (up to 100 bytes) or tcp:HOST:PORT"),
        token_sha256=fields.text(
            "tokenSha256", pattern=r"[0-9A-Fa-f]{64}", expected="the token's SHA-256 in 64 hexadecimal digits"
        ).lower(),
        host=HostConfig(
            state_dir=fields.text("stateDir", **path),
            mode=fields.choice("mode", MODES, "Auto"),
            places=fields.whole("places", 1, least=1, most=10_000),
            root=fields.text("root", "/", **path),
            root_layers=tuple(fields.texts("rootLayers", [])),
            masks=tuple(fields.texts("masks", [])),
            binds=tuple(_bind(item, f"config.binds[{n}]") for n, item in enumerate(fields.items("binds"))),
            environment=dict(environment),
            user=fields.text("user", None, pattern=r"[^\0]+", expected="a name, a uid or uid:gid"),
            memory_bytes=fields.whole("memoryBytes", None, least=1),
            disk_bytes=fields.whole("diskBytes", None, least=1),
            rest_seconds=fields.number("restSeconds", REST_SECONDS) or None,
        ),
        idle_seconds=fields.number("idleSeconds", 900),
        ready_file=fields.text("readyFile", None, **path),
        remove_at_end=fields.text("removeAtEnd", None, **path),
        runner_locks=fields.text("runnerLocks", None, **path),
    )
    fields.done()
    return config


def _bind(value: object, where: str) -> Bind:
    fields = Fields(value, where, ValueError)
    bind = Bind(
        fields.text("source", pattern=_ABSOLUTE, expected="an absolute path"),
        fields.text("target", pattern=_ABSOLUTE, expected="an absolute path"),
        fields.flag("readOnly", True),
    )
    fields.done()
    return bind
