"""The options of a plugin are the parameters of its class: in the manifest by their names in camelCase, checked by type."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.alias_generators import to_camel

from agent_runtime.extensions import ExtensionError
from rollout_api.manifest import explain, path_of


def options_of(plugin_class: type[Any], name: str) -> type[BaseModel]:
    """The options that a class takes, as a model. Raises ExtensionError for a parameter that no manifest could give."""
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
    """An instance with these options. Raises ExtensionError with every option that is wrong."""
    model = options_of(plugin_class, name)
    try:
        options = model.model_validate(dict(config))
    except ValidationError as error:
        problems = [f"config.{path_of(place)}: {message}" for place, message in explain(error, model, dict(config))]
        raise ExtensionError("\n".join(f"plugin {name!r}: {problem}" for problem in problems)) from error
    try:
        return plugin_class(**{field: getattr(options, field) for field in model.model_fields})
    except Exception as error:
        raise ExtensionError(f"plugin {name!r} could not be made: {type(error).__name__}: {error}") from error
