"""Harbor's environment settings as a manifest's `sandbox`: `environment_kwargs` and `environment_import_path`."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from agent_runtime.extensions import ExtensionError, load_object
from agent_runtime.integrations.harbor_server.settings import RemoteSettings, SettingsError
from agent_runtime.sandboxes.base import SandboxProvider
from rollout_api.sandbox import Provider

HARBORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "harbor.environments.docker.docker:DockerEnvironment": {"provider": Provider.CONTAINER.value},
    "harbor.environments.ack:ACKEnvironment": {"provider": Provider.KODO.value, "kodo": {"backend": "Kubernetes"}},
}
"""Harbor's environment classes, and the fields of `spec.sandbox` that replace them."""
RESOURCES: Final = {"cpus": ("cpu", "{:g}"), "memory_mb": ("memory", "{:g}Mi"), "storage_mb": ("disk", "{:g}Mi")}
"""Harbor's names of resources, and ours with their formats."""
_IMAGES: Final = ("image", "docker_image", "sandbox_image")
_VARIABLES: Final = "sandbox_env_vars"
_METHODS: Final = ("open", "acquire", "reattach", "sweep", "forget_group", "close")


@dataclass(frozen=True)
class Environment:
    """The converted `environment_kwargs`."""

    task: dict[str, Any] = field(default_factory=dict)
    """Fields of a task's `sandbox`; they override the task's own."""
    job: dict[str, Any] = field(default_factory=dict)
    """Fields of `spec.sandbox`."""
    not_honoured: list[str] = field(default_factory=list)
    """Names of unsupported settings."""


def resources_of(given: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the fields of `resources`; removes the converted ones from `given`."""
    return {
        ours: form.format(given.pop(prefix + name))
        for name, (ours, form) in RESOURCES.items()
        if isinstance(given.get(prefix + name), int | float) and not isinstance(given[prefix + name], bool)
    }


def read_environment(kwargs: Mapping[str, Any], provider: str) -> Environment:
    """Convert `environment_kwargs` for sandboxes of a provider. Pure."""
    left = dict(kwargs)
    task: dict[str, Any] = {}
    job: dict[str, Any] = {}
    if resources := resources_of(left):
        task["resources"] = resources
    for name in _IMAGES:
        if isinstance(left.get(name), str):
            task["image"] = left.pop(name)
    if isinstance(variables := _parsed(left.get(_VARIABLES)), dict):
        del left[_VARIABLES]
        task["env"] = [{"name": name, "value": str(value)} for name, value in variables.items()]
    if isinstance(seconds := _parsed(left.get("claim_timeout")), int | float):
        del left["claim_timeout"]
        job["startSeconds"] = round(seconds)
    if provider == Provider.KODO:
        for name, ours in (("namespace", "namespace"), ("node_selector", "nodeSelector")):
            if left.get(name) is not None:
                job.setdefault("kodo", {})[ours] = left.pop(name) if ours == "namespace" else _parsed(left.pop(name))
    return Environment(task, job, sorted(name for name, value in left.items() if value is not None))


def changed_sandbox(sandbox: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's `sandbox` with `Environment.task` applied. Pure."""
    changed = {**sandbox, **task}
    if "resources" in task:
        changed["resources"] = {**(sandbox.get("resources") or {}), **task["resources"]}
    if "env" in task:
        names = {variable["name"] for variable in task["env"]}
        changed["env"] = [v for v in sandbox.get("env") or [] if v["name"] not in names] + task["env"]
    return changed


def own_provider(settings: RemoteSettings) -> Callable[[], SandboxProvider] | None:
    """Return a function that makes the provider of `environment_import_path` from `environment_kwargs`; None if it
    names a provider of this project.

    Raises SettingsError.
    """
    path = settings.environment_import_path
    if path is None or path in HARBORS:
        return None
    where = "remote_agent.environment_import_path"
    try:
        made = load_object(path, where)
    except ExtensionError as error:
        raise SettingsError(f"{error}. Supported environments of Harbor: {', '.join(HARBORS)}") from error
    if missing := [name for name in _METHODS if not callable(getattr(made, name, None))]:
        raise SettingsError(
            f"{where}: {path!r} has no {', '.join(missing)}; expected a class that implements SandboxProvider of "
            f"agent_runtime/sandboxes/base.py, or one of {', '.join(HARBORS)}"
        )
    kwargs = dict(settings.environment_kwargs or {})
    try:
        inspect.signature(made).bind(**kwargs)
    except TypeError as error:
        raise SettingsError(f"remote_agent.environment_kwargs: {path} does not accept them: {error}") from error
    return partial(made, **kwargs)


def _parsed(value: Any) -> Any:
    """Parse JSON text, the format of objects and numbers on the command line."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
