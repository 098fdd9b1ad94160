"""JSON schemas of tools: derives them from signatures, and checks arguments, with error messages for the model."""

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from agent_runtime.tools.base import Tool, ToolContext, ToolError

SHOWN_INPUT = 120  # characters of a wrong value in an error
_ARGUMENT_LINE = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?:\s*(.*)$")
_SIMPLE_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
_BOUNDS = {"minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt"}
_CONSTRAINTS: dict[str, dict[str, str]] = {
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "string": {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"},
    "array": {"minItems": "min_length", "maxItems": "max_length"},
}


class ArgumentsError(ToolError):
    """Arguments that do not match the schema; the message has one line for each problem."""


def openai_definition(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


class Signature:
    """The arguments of a function: their JSON schema, and the conversion from JSON.

    Types, defaults, `Annotated` texts and Fields, and the `Args:` of the docstring are used. A parameter of type
    ToolContext is not an argument for the model; one without a type accepts any JSON value. Raises TypeError for a type
    that JSON cannot represent.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(function, include_extras=True)
        docstring = inspect.getdoc(function) or ""
        described = _described_arguments(docstring)
        arguments: list[tuple[str, Any, Any]] = []
        self.context_parameter: str | None = None
        for parameter in inspect.signature(function).parameters.values():
            where = f"{function.__qualname__}: parameter {parameter.name}"
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"{where} cannot be given by name; make it a plain parameter")
            hint = hints.get(parameter.name, Any)
            if hint is ToolContext:
                self.context_parameter = parameter.name
                continue
            default = ... if parameter.default is parameter.empty else parameter.default
            arguments.append((parameter.name, _with_description(hint, described.get(parameter.name)), default))
        try:
            self._model = _object_model(arguments, extra="forbid")
            self.schema = _schema(self._model)
        except PydanticUserError as error:
            raise TypeError(f"{function.__qualname__}: a parameter's type cannot come from JSON: {error}") from error
        self.description = re.split(r"^Args:$", docstring, maxsplit=1, flags=re.MULTILINE)[0].strip()

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the function's keyword arguments without the context. Raises ArgumentsError."""
        checked = _validated(self._model, arguments)
        return {info.alias or field: getattr(checked, field) for field, info in self._model.model_fields.items()}


def checked_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that match a JSON schema, with defaults filled in and `"5"` converted to 5. Raises
    ArgumentsError.
    """
    model = _model_of_schema(json.dumps(parameters))
    return _validated(model, arguments).model_dump(by_alias=True, exclude_unset=True) | {
        name: schema["default"]
        for name, schema in parameters.get("properties", {}).items()
        if name not in arguments and isinstance(schema, Mapping) and "default" in schema
    }


def readable(error: ValidationError, known: Sequence[str]) -> str:
    """Return each problem of an argument and the expected value, one per line."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"]) or "arguments"
        if problem["type"] == "missing":
            lines.append(f"{where}: is required, but missing")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown argument; the arguments are {', '.join(known) or 'none'}")
        else:
            shown = json.dumps(problem["input"], default=str)
            shown = shown if len(shown) <= SHOWN_INPUT else shown[:SHOWN_INPUT] + "…"
            lines.append(f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, got {shown}")
    return "\n".join(lines)


class _WithoutTitles(GenerateJsonSchema):
    """Omits the titles that pydantic derives from names, which are useless in a prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _object_model(properties: Iterable[tuple[str, Any, Any]], extra: Literal["allow", "forbid"]) -> type[BaseModel]:
    """Return a pydantic model of (name, type, default); names are aliases, because `json` or `_x` cannot name its
    fields.
    """
    fields: dict[str, Any] = {
        f"argument_{position}": (hint, Field(default, alias=name))
        for position, (name, hint, default) in enumerate(properties)
    }
    # JSON schemas may have patterns with look-around, which pydantic's own engine does not support.
    return create_model("Arguments", __config__=ConfigDict(extra=extra, regex_engine="python-re"), **fields)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(schema_generator=_WithoutTitles)
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _validated(model: type[BaseModel], arguments: Mapping[str, Any]) -> BaseModel:
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as error:
        known = [info.alias or field for field, info in model.model_fields.items()]
        raise ArgumentsError(readable(error, known)) from None


def _with_description(hint: Any, described: str | None) -> Any:
    """Return a type with its description: the first text in Annotated, else that of the docstring."""
    metadata = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    if any(isinstance(item, FieldInfo) and item.description for item in metadata):
        return hint
    text = next((item for item in metadata if isinstance(item, str)), described)
    return Annotated[hint, Field(description=text)] if text else hint


def _described_arguments(docstring: str) -> dict[str, str]:
    described: dict[str, str] = {}
    name = None
    for line in docstring.partition("Args:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        if match := _ARGUMENT_LINE.match(line):
            name = match[1]
            described[name] = match[2].strip()
        elif name and line.strip():
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described


@functools.lru_cache(maxsize=256)
def _model_of_schema(schema_json: str) -> type[BaseModel]:
    schema = json.loads(schema_json)
    model = _type_of({**schema, "type": "object"}, schema.get("$defs", {}), frozenset())
    return model if isinstance(model, type) and issubclass(model, BaseModel) else _object_model([], extra="allow")


def _type_of(schema: Any, definitions: Mapping[str, Any], inside: frozenset[str]) -> Any:
    """Return the type that a JSON schema describes; Any for unsupported keywords."""
    if not isinstance(schema, Mapping):
        return Any
    if reference := schema.get("$ref"):
        name = str(reference).rpartition("/")[2]
        # Recursive types are checked one level deep.
        return Any if name in inside else _type_of(definitions.get(name), definitions, inside | {name})
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return Literal[tuple(choices)] if all(isinstance(one, str | int | None) for one in choices) else Any
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return Union[tuple(_type_of(option, definitions, inside) for option in schema[key])]  # noqa: UP007
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(_type_of({**schema, "type": one}, definitions, inside) for one in kind)]  # noqa: UP007
    hint: Any = _SIMPLE_TYPES.get(str(kind), Any)
    if kind == "array":
        hint = list[_type_of(schema.get("items"), definitions, inside)]  # type: ignore[misc]
    elif kind == "object" and not schema.get("properties"):
        hint = dict[str, Any] if schema.get("additionalProperties", True) is not False else _object_model([], "forbid")
    elif kind == "object":
        required = schema.get("required", [])
        hint = _object_model(
            [
                (name, _type_of(inner, definitions, inside), ... if name in required else None)
                for name, inner in schema["properties"].items()
            ],
            extra="forbid" if schema.get("additionalProperties") is False else "allow",
        )
    limits = {limit: schema[key] for key, limit in _CONSTRAINTS.get(str(kind), {}).items() if key in schema}
    return Annotated[hint, Field(**limits)] if limits else hint
