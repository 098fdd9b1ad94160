"""Plugins by their names in a manifest.

The options of a plugin are the parameters of its class: in the manifest their names are in camelCase, and their types
are checked.
"""

import difflib
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.alias_generators import to_camel

from agent_runtime.extensions import ExtensionError, Registry, create
from agent_runtime.plugins.base import KINDS
from rollout_api.manifest import explain
from rollout_api.rollout_job import PluginUse


def options_of(plugin_class: type[Any], name: str) -> type[BaseModel]:
    """Return the options of a class as a model. Raises ExtensionError for a parameter that a manifest cannot set."""
    if plugin_class.__init__ is object.__init__:
        return create_model("Options", __config__=_CONFIG)
    hints = typing.get_type_hints(plugin_class.__init__, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(plugin_class.__init__).parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ExtensionError(f"plugin {name!r}: parameter {parameter} of its class cannot be given by name")
        if parameter.name not in hints:
            raise ExtensionError(f"plugin {name!r}: parameter {parameter.name} of its class has no type; annotate it")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default))
    try:
        return create_model("Options", __config__=_CONFIG, **fields)
    except PydanticUserError as error:
        raise ExtensionError(f"plugin {name!r}: a parameter's type cannot come from a manifest: {error}") from error


_CONFIG = ConfigDict(extra="forbid", alias_generator=to_camel, validate_by_alias=True, validate_by_name=False)


def made(plugin_class: type[Any], name: str, config: Mapping[str, Any]) -> Any:
    """Return an instance with these options. Raises ExtensionError with every invalid option."""
    model = options_of(plugin_class, name)
    try:
        options = model.model_validate(dict(config))
    except ValidationError as error:
        problems = explain(error, model, dict(config), within=("config",))
        raise ExtensionError("\n".join(f"plugin {name!r}: {problem}" for problem in problems)) from error
    given = {field: getattr(options, field) for field in model.model_fields}
    return create("plugin", name, lambda: plugin_class(**given))


registry = Registry(
    "plugin",
    "agent_rollouts.plugins",
    {
        "PerformanceStop": "agent_runtime.plugins.builtin:PerformanceStop",
        "TrajectoryAnalysis": "agent_runtime.plugins.builtin:TrajectoryAnalysis",
        "SafetyFilter": "agent_runtime.plugins.safety_filter:SafetyFilter",
    },
    optional={"RealWork": "agent-rollouts[plugins]"},
)

DEFAULT_TIMEOUT_SECONDS = PluginUse(name="default").timeout_seconds
"""Default time limit of the Python client's plugins."""


@dataclass(frozen=True)
class Loaded:
    """A job's plugin, ready to be called."""

    name: str
    plugin: Any
    timeout_seconds: float


@dataclass(frozen=True)
class Description:
    """Description of a plugin for users. `options` is a JSON schema."""

    name: str
    about: str
    kinds: list[str]
    hooks: list[str]
    options: dict[str, Any]


def load_plugins(uses: Sequence[PluginUse], in_process: Sequence[object] = ()) -> list[Loaded]:
    """Load the plugins of a job in order, those of the Python client last. Raises ExtensionError for a plugin that
    cannot work.
    """
    loaded = [Loaded(use.name, made(_class_of(use.name), use.name, use.config), use.timeout_seconds) for use in uses]
    for plugin in in_process:
        plugin = made(plugin, plugin.__name__, {}) if inspect.isclass(plugin) else plugin
        loaded.append(Loaded(type(plugin).__name__, plugin, DEFAULT_TIMEOUT_SECONDS))
    names = [plugin.name for plugin in loaded]
    for name, plugin in zip(names, loaded, strict=True):
        if names.count(name) > 1:
            raise ExtensionError(f"two plugins are named {name!r}; names must be unique; remove one")
        hooks_of(plugin.plugin, name)
    return loaded


def unused_hooks(plugins: Sequence[Loaded]) -> list[str]:
    """Return warnings about hooks that are not called for a program agent, which runs its tools itself."""
    said = []
    for loaded in plugins:
        lost = [
            hook for hook in hooks_of(loaded.plugin, loaded.name) if hook in ("filter_tool_call", "after_tool_call")
        ]
        if lost:
            said.append(
                f"plugin {loaded.name}: {' and '.join(lost)} will not be called. A program as the agent runs its tools "
                "itself; only before_tool_call is called, for the tool calls in the model's answers"
            )
    return said


def describe_plugin(name: str) -> Description:
    """Describe a plugin by its name. Raises ExtensionError."""
    plugin_class = _class_of(name)
    hooks = hooks_of(plugin_class, name)
    schema = options_of(plugin_class, name).model_json_schema(by_alias=True)
    about = inspect.getdoc(plugin_class) or ""
    return Description(name, about, [kind for kind, hook in KINDS.items() if hook in hooks], hooks, schema)


def hooks_of(plugin: Any, name: str) -> list[str]:
    """Return the hooks of a plugin or its class. Raises ExtensionError if it has none, a misspelt one, or one with an
    unknown argument.
    """
    known = _hooks()
    methods = [method for method in dir(plugin) if not method.startswith("_") and callable(getattr(plugin, method))]
    for method in methods:
        if method not in known and (
            method.startswith(("before_", "after_")) or difflib.get_close_matches(method, known, 1, 0.9)
        ):
            near = difflib.get_close_matches(method, known, 1, 0)[0]
            raise ExtensionError(
                f"plugin {name!r}: there is no hook {method}; did you mean {near}? Rename methods that are not hooks"
            )
    hooks = [hook for hook in known if hook in methods]
    for hook in hooks:
        _check_arguments(plugin, hook, known[hook], name)
    if not hooks:
        raise ExtensionError(f"plugin {name!r} has no hook; expected methods named like {', '.join(known)}")
    return hooks


def _check_arguments(plugin: Any, hook: str, allowed: Sequence[str], name: str) -> None:
    """Check the arguments of a hook's method, which the hook passes by name. Raises ExtensionError."""
    parameters = list(inspect.signature(getattr(plugin, hook)).parameters.values())
    if inspect.isclass(plugin) and inspect.isfunction(inspect.getattr_static(plugin, hook)):
        parameters = parameters[1:]  # self
    for parameter in parameters:
        is_passed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_passed and parameter.name not in allowed:
            raise ExtensionError(
                f"plugin {name!r}: {hook} has no argument {parameter.name!r}; its arguments are {', '.join(allowed)}, and "
                "a method takes those that it needs"
            )


def _class_of(name: str) -> type[Any]:
    found = registry.find(name)
    if not inspect.isclass(found):
        raise ExtensionError(f"plugin {name!r} is {found!r}, not a class; see docs/plugins.md")
    if inspect.isabstract(found):
        left = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ExtensionError(f"plugin {name!r} lacks {left}, which its base class requires")
    return found


def _hooks() -> Mapping[str, Sequence[str]]:
    """Return the arguments of each hook."""
    try:
        from agent_runtime.plugins.hooks import HOOKS, Hooks
    except ModuleNotFoundError as error:
        if error.name != "pluggy":
            raise
        raise ExtensionError("plugins need pluggy: pip install 'agent-rollouts[plugins]'") from error
    return {hook: list(inspect.signature(getattr(Hooks, hook)).parameters)[1:] for hook in HOOKS}
