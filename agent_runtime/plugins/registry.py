"""Plugins by the names that a manifest uses."""

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.extensions import ExtensionError, Registry
from agent_runtime.plugins.base import KINDS
from agent_runtime.plugins.options import made, options_of
from rollout_api.rollout_job import PluginUse

registry = Registry(
    "plugin",
    "agent_rollouts.plugins",
    {
        "PerformanceStop": "agent_runtime.plugins.performance_stop:PerformanceStop",
        "TrajectoryAnalysis": "agent_runtime.plugins.trajectory_analysis:TrajectoryAnalysis",
        "RealWork": "agent_runtime.integrations.real_work:RealWork",
        "SafetyFilter": "agent_runtime.plugins.safety_filter:SafetyFilter",
    },
)

DEFAULT_TIMEOUT_SECONDS = PluginUse(name="default").timeout_seconds
"""Of plugins that the Python client brings."""


@dataclass(frozen=True)
class Loaded:
    """A plugin of a job, ready to be called."""

    name: str
    plugin: Any
    timeout_seconds: float


@dataclass(frozen=True)
class Description:
    """What a person should know of a plugin. `options` is a JSON schema."""

    name: str
    about: str
    kinds: list[str]
    hooks: list[str]
    options: dict[str, Any]


def load_plugins(uses: Sequence[PluginUse], in_process: Sequence[object] = ()) -> list[Loaded]:
    """The plugins of a job in their order, those of the Python client last. Raises ExtensionError where one is no use."""
    loaded = [Loaded(use.name, made(_class_of(use.name), use.name, use.config), use.timeout_seconds) for use in uses]
    for plugin in in_process:
        plugin = made(plugin, plugin.__name__, {}) if inspect.isclass(plugin) else plugin
        loaded.append(Loaded(type(plugin).__name__, plugin, DEFAULT_TIMEOUT_SECONDS))
    names = [plugin.name for plugin in loaded]
    for name, plugin in zip(names, loaded, strict=True):
        if names.count(name) > 1:
            raise ExtensionError(f"two plugins are named {name!r}; results are kept by name, so drop one")
        hooks_of(plugin.plugin, name)
    return loaded


def unheard(plugins: Sequence[Loaded]) -> list[str]:
    """What each plugin cannot do where the agent is a program in the sandbox, which runs its tools by itself."""
    said = []
    for loaded in plugins:
        lost = [
            hook for hook in hooks_of(loaded.plugin, loaded.name) if hook in ("filter_tool_call", "after_tool_call")
        ]
        if lost:
            said.append(
                f"plugin {loaded.name}: {' and '.join(lost)} of it will not be called. A Command agent runs its tools by "
                "itself; before_tool_call sees the calls in the model's answers, nothing sees what the program makes of them"
            )
    return said


def describe_plugin(name: str) -> Description:
    """A plugin by its name. Raises ExtensionError."""
    plugin_class = _class_of(name)
    hooks = hooks_of(plugin_class, name)
    schema = options_of(plugin_class, name).model_json_schema(by_alias=True)
    about = inspect.getdoc(plugin_class) or ""
    return Description(name, about, [kind for kind, hook in KINDS.items() if hook in hooks], hooks, schema)


def hooks_of(plugin: Any, name: str) -> list[str]:
    """The hooks that a plugin, or its class, has. Raises ExtensionError where it has none, or one that is misspelt."""
    known = _hook_names()
    methods = [method for method in dir(plugin) if not method.startswith("_") and callable(getattr(plugin, method))]
    for method in methods:
        if method not in known and (
            method.startswith(("before_", "after_")) or difflib.get_close_matches(method, known, 1, 0.9)
        ):
            near = difflib.get_close_matches(method, known, 1, 0)[0]
            raise ExtensionError(
                f"plugin {name!r}: there is no hook {method}; did you mean {near}? Begin other methods with another word"
            )
    hooks = [hook for hook in known if hook in methods]
    if not hooks:
        raise ExtensionError(f"plugin {name!r} has no hook; expected methods named like {', '.join(known)}")
    return hooks


def _class_of(name: str) -> type[Any]:
    found = registry.find(name)
    if not inspect.isclass(found):
        raise ExtensionError(f"plugin {name!r} is {found!r}, not a class; see docs/plugins.md")
    if inspect.isabstract(found):
        left = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ExtensionError(f"plugin {name!r} lacks {left}, which its base class asks for")
    return found


def _hook_names() -> Sequence[str]:
    try:
        from agent_runtime.plugins.hooks import HOOKS
    except ModuleNotFoundError as error:
        if error.name != "pluggy":
            raise
        raise ExtensionError("plugins need pluggy: pip install 'agent-rollouts[plugins]'") from error
    return HOOKS
