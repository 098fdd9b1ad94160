"""Read a manifest in YAML or JSON as a RolloutJob, or report all its problems, each with field and line.

Parsing is as strict as an API server's. For example, a number in place of text is rejected, not converted. A manifest
that is valid on a laptop is therefore also valid in a cluster.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollout_api.base import API_VERSION
from rollout_api.json_schema import json_schema
from rollout_api.rollout_job import RolloutJob

KIND = "RolloutJob"

MANIFEST_BYTES = 3 * 1024 * 1024
"""Most bytes of a manifest: the largest request that an API server accepts."""

MANIFEST_VALUES = 1_000_000
"""Most values in a manifest, with aliases expanded. A few lines of nested aliases can stand for billions of values."""

MANIFEST_DEPTH = 100
"""Deepest nesting of a manifest. The API's own types need fewer than 20 levels."""

SHOWN_CHARACTERS = 60
"""Most characters of an invalid value that a message repeats."""

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """One problem of a manifest."""

    path: str
    """Path of the field, such as `spec.tasks.inline[0].name`; empty for the manifest as a whole."""
    message: str
    line: int | None = None
    """Line of the text, from 1."""

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


class ManifestError(ValueError):
    """An invalid manifest. `problems` has all its problems in the order of its lines."""

    def __init__(self, problems: Sequence[Problem], source: str = "manifest") -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line or 0)
        self.source = source
        count = f"{len(self.problems)} problems" if len(self.problems) != 1 else "1 problem"
        super().__init__("\n".join([f"{source} has {count}:", *(f"  {problem}" for problem in self.problems)]))


def load_manifest(path_or_text: str | Path) -> RolloutJob:
    """Read a RolloutJob from a file (a Path, or a string of one line) or from text in YAML or JSON.

    Raises ManifestError with all problems, and nothing else, whatever the input is.
    """
    text, source = _read(path_or_text)
    document = _parse(text, source)
    problems = document.problems + (headers := _header_problems(document))
    if not headers:
        try:
            job = validate(RolloutJob, document.value)
            if not problems:
                return job
        except ValidationError as error:
            known = {problem.path for problem in problems}
            problems += [
                Problem(path_of(location), message, document.line(location))
                for location, message in located_messages(error, RolloutJob, document.value)
                if path_of(location) not in known
            ]
    raise ManifestError(problems, source)


def locate_problems(path: Path, found: Iterable[tuple[Location, str]]) -> list[Problem]:
    """Return problems found in a parsed manifest, with the lines of their fields."""
    document = _parse(*_read(path))
    return [Problem(path_of(location), message, document.line(location)) for location, message in found]


def validate(model: type[Model], value: Any) -> Model:
    """Validate a parsed value strictly, by wire names. Raises pydantic's ValidationError."""
    return model.model_validate_json(json.dumps(value), strict=True, by_alias=True, by_name=False)


def path_of(location: Location) -> str:
    """Format a location as a dotted path, such as `tasks.inline[0].name`. Ambiguous names are quoted: `labels["a.b"]`."""
    parts = (
        f".{part}" if isinstance(part, str) and re.fullmatch(r"[\w-]+", part) else f"[{json.dumps(part)}]"
        for part in location
    )
    return "".join(parts).removeprefix(".")


# Text to values


@dataclass
class _Document:
    """A parsed text: its value and the line of each field."""

    value: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    values: int = 0

    def line(self, location: Location) -> int | None:
        """Return the line of a field, or of the nearest enclosing field in the text."""
        while location not in self.lines:
            if not location:
                return None
            location = location[:-1]
        return self.lines[location]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Resolves plain scalars as `kubectl` does. PyYAML would read 2026-01-31 as a date and 12:30 as 750."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$", list("tTfFyYnNoO")),
    ("int", r"^[-+]?(?:[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", list("-+.")),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


def _read(path_or_text: str | Path) -> tuple[str, str]:
    if isinstance(path_or_text, str) and ("\n" in path_or_text or path_or_text.lstrip().startswith("{")):
        return path_or_text, "manifest"
    source = str(path_or_text)
    try:
        data = Path(path_or_text).read_bytes()
        return data.decode("utf-8-sig"), source
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.start} cannot be read; save the file as UTF-8"
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}; give the path of a manifest"
    raise ManifestError([Problem("", f"{source!r} {problem}")], source)


def _parse(text: str, source: str) -> _Document:
    """Parse the single YAML or JSON document of a text. Raises ManifestError if there is no value."""
    if len(text.encode(errors="replace")) > MANIFEST_BYTES:
        message = f"is larger than {MANIFEST_BYTES >> 20} MiB; put the tasks into a file and use tasks.from"
        raise ManifestError([Problem("", message)], source)
    if text.lstrip().startswith("{"):
        text = _json_as_yaml(text)
    document = _Document()
    try:
        _check_depth(text)
        nodes = list(yaml.compose_all(text, Loader=_Loader))
        roots = [node for node in nodes if node is not None and node.tag != f"{_TAG}null"]
        if len(roots) == 1:
            document.value = _value(roots[0], (), document, 0)
            return document
        if roots:
            found = f"has {len(roots)} documents, expected one; move the others to files of their own"
            problem = Problem("", found, roots[1].start_mark.line + 1)
        else:
            problem = Problem("", "is empty, expected a RolloutJob", 1)
    except _Unreadable as error:
        problem = error.problem
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = " ".join(filter(None, (error.context, error.problem)))
        lines = text.split("\n")
        if mark and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
            why = "the line has a tab; indent with spaces"
        problem = Problem("", f"is not valid YAML: {why}", mark.line + 1 if mark else None)
    except (yaml.YAMLError, UnicodeError) as error:
        problem = Problem("", f"is not valid YAML: {' '.join(str(error).split())}")
    raise ManifestError([problem], source)


class _Unreadable(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.problem = Problem("", message, line)


def _check_depth(text: str) -> None:
    """Raise _Unreadable for a text that is nested too deeply. PyYAML's composer would overflow the C stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MANIFEST_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise _Unreadable(
                f"is nested more than {MANIFEST_DEPTH} levels deep; no field of a manifest needs that many", line
            )


def _json_as_yaml(text: str) -> str:
    """Convert JSON into YAML. They differ in tabs between tokens and in escaped surrogate pairs; valid JSON has no
    other tabs.
    """

    def character(match: re.Match[str]) -> str:
        pair: str = match.group()
        return pair if pair == r"\\" else json.loads(f'"{pair}"')

    return re.sub(
        r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}", character, text.replace("\t", " ")
    )


def _value(node: yaml.Node, location: Location, document: _Document, depth: int) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(location, line)
    document.values += 1
    if document.values > MANIFEST_VALUES:
        raise _Unreadable(f"has more than {MANIFEST_VALUES} values; an alias counts each time that it is used", line)
    if depth > MANIFEST_DEPTH:
        raise _Unreadable(f"is nested more than {MANIFEST_DEPTH} levels deep; an alias may not contain itself", line)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*location, i), document, depth + 1) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, location, document, depth)
    value, problem = _scalar(node)
    if problem:
        document.problems.append(Problem(path_of(location), problem, line))
    return value


def _mapping(node: yaml.MappingNode, location: Location, document: _Document, depth: int) -> dict[str, Any]:
    own: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == f"{_TAG}merge":
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                if not isinstance(source, yaml.MappingNode):
                    raise _Unreadable("'<<' takes a mapping or a list of mappings", line)
                merged = _mapping(source, location, document, depth + 1) | merged
            continue
        if key_node.tag != f"{_TAG}str":
            problem = f"field name {_shorten(key_node.value)} is not text; put it in quotes"
            document.problems.append(Problem(path_of(location), problem, line))
            continue
        key = key_node.value
        if key in own:
            first = document.lines[(*location, key)]
            problem = f"is given twice, first in line {first}; keep one of them"
            document.problems.append(Problem(path_of((*location, key)), problem, line))
            continue
        document.lines[(*location, key)] = line
        own[key] = _value(value_node, (*location, key), document, depth + 1)
    return merged | own


def _scalar(node: yaml.Node) -> tuple[Any, str | None]:
    """Return the value of a scalar, or None and its problem."""
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    try:
        if kind == "str":
            return text, None
        if kind == "null":
            return None, None
        if kind == "bool":
            return text.lower() in ("true", "yes", "on"), None
        if kind == "int":
            digits = text.lower().lstrip("+-")
            octal = len(digits) > 1 and digits.startswith("0") and digits[1] not in "xo"
            number = int(digits, 8) if octal else int(digits, 0)
            return -number if text.startswith("-") else number, None
        if kind == "float" and math.isfinite(fraction := float(text)):
            return fraction, None
    except ValueError:
        pass
    if kind in ("int", "float"):
        return None, f"{_shorten(text)} is not a number that JSON can hold; put it into quotes if it is text"
    return None, f"tag {node.tag!r} is not supported; write plain YAML"


def _header_problems(document: _Document) -> list[Problem]:
    """Return problems that show that the document is not a RolloutJob, so that its fields need no checks."""
    value = document.value
    if not isinstance(value, dict):
        return [Problem("", f"is {_kind(value)}, expected a mapping with apiVersion, kind, metadata and spec", 1)]
    problems = []
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        found = value.get(name)
        if found != expected:
            what = (
                f"is {_shorten(found)}, expected {expected}"
                if name in value
                else f"is missing; write {name}: {expected}"
            )
            problems.append(Problem(name, what, document.line((name,))))
    return problems


# Messages for pydantic's errors


def explain(error: ValidationError, model: type[BaseModel], value: Any, within: Location = ()) -> tuple[Problem, ...]:
    """Return pydantic's errors as problems, without lines. `within` is the location of the value in the manifest."""
    found = located_messages(error, model, value)
    return tuple(Problem(path_of((*within, *location)), message) for location, message in found)


def located_messages(error: ValidationError, model: type[BaseModel], value: Any) -> list[tuple[Location, str]]:
    """Return the field of each of pydantic's errors, with a message that needs no knowledge of pydantic."""
    found: dict[Location, list[str]] = {}
    located = [(_location(details, value), details) for details in error.errors(include_url=False)]
    parents = {location[:length] for location, _ in located for length in range(len(location))}
    for location, details in located:
        if details["type"] in ("literal_error", "enum") and location in parents:
            continue  # the user gave a list, whose own errors are reported separately
        message = _wording(details, location, model)
        if message not in found.setdefault(location, []):
            found[location].append(message)
    # Several messages on one field are the alternatives of a union.
    return [(location, "; or ".join(messages)) for location, messages in found.items()]


def _location(details: ErrorDetails, value: Any) -> Location:
    """Return the location of an error in the value: pydantic's location without the names of union members."""
    location: list[str | int] = []
    for part in details["loc"]:
        if _has(value, part):
            value = value[part]
        elif details["type"] != "missing" or part != details["loc"][-1]:
            continue
        location.append(part)
    return tuple(location)


def _has(value: Any, part: str | int) -> bool:
    return part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))


def _wording(details: ErrorDetails, location: Location, model: type[BaseModel]) -> str:
    kind, given = details["type"], details["input"]
    context = details.get("ctx", {})
    if kind == "missing":
        return " ".join(filter(None, ("is missing.", _description(model, location))))
    if kind == "extra_forbidden":
        return _unknown_field(model, location)
    if kind in ("enum", "literal_error"):
        allowed = re.findall(r"'([^']*)'", context["expected"])
        return f"{_shorten(given)} is not allowed, expected {_one_of(allowed)}{_nearest(given, allowed)}"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error") or details["msg"])
    if expected := _EXPECTED_TYPE.get(kind):
        if given is None:
            return f"is empty, expected {expected}; fill it in or leave the field out"
        quotes = "; put it into quotes" if kind == "string_type" and isinstance(given, bool | int | float) else ""
        brackets = "; put it into [brackets]" if kind == "list_type" and isinstance(given, str) else ""
        return f"is {_kind(given)}, expected {expected}{quotes}{brackets}"
    if template := _BOUNDS.get(kind):
        return f"is {_shorten(given)}, expected {template.format_map({k: _plain(v) for k, v in context.items()})}"
    if kind in ("too_long", "too_short", "string_too_long", "string_too_short"):
        limit = context.get("max_length", context.get("min_length"))
        size = len(given) if isinstance(given, str | list | dict) else "?"
        unit = "characters" if kind.startswith("string") else "entries"
        return f"has {size} {unit}, expected at {'most' if kind.endswith('long') else 'least'} {limit}"
    if kind == "string_pattern_mismatch":
        meaning = _description(model, location)
        form = _FORMS.get(context["pattern"], context["pattern"])
        return f"{_shorten(given)} does not have the expected form: {form}. {meaning}".rstrip()
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}"


_EXPECTED_TYPE = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}


_FORMS = {
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "lowercase letters, digits and '-', with a letter or digit at both ends",
    r"^[A-Za-z0-9][A-Za-z0-9._@+=-]*$": "letters, digits and any of ._@+=-, without spaces; a letter or digit first",
    r"^[0-9]+(\.[0-9]+)?(m|k|[MGTP]|[KMGTP]i)?$": "a number with a unit such as m, M, Mi or Gi, without spaces",
    r"^/[^\x00]*$": "an absolute path, such as /workspace",
    r"^https?://[^\s/]+(/[^\s?#]*)?$": "a URL that begins with http:// or https://, such as http://localhost:8000/v1",
    r"^[-._A-Za-z][-._A-Za-z0-9]*$": "the name of an environment variable: letters, digits and any of _.-, no digit first",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable: letters, digits and '_', no digit first",
    r"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]):[0-9]{1,5}$": "a host and a port, such as "
    "pypi.org:443",
    r"\S": "text that is not blank",
}
"""Patterns of fields in words."""


def _plain(value: Any) -> Any:
    """Return 0 for 0.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool | int | float):
        return f"{'the number ' if not isinstance(value, bool) else ''}{json.dumps(value)}"
    if isinstance(value, str):
        return f"the text {_shorten(value)}"
    return "a list" if isinstance(value, list) else "a mapping"


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _nearest(name: Any, names: Sequence[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(str(name).lower().replace("_", ""), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


_OTHER_NAMES = {
    "api_base": "baseURL",
    "base_url": "baseURL",
    "url": "baseURL",
    "model": "name",
    "api_key": "apiKeyFrom",
    "cmd": "commands",
    "script": "commands",
    "instruction": "prompt",
    "question": "prompt",
    "problem_statement": "prompt",
    "id": "name",
    "timeout": "timeouts",
}
"""Field names of other systems, and ours for the same."""


def _unknown_field(model: type[BaseModel], location: Location) -> str:
    name = str(location[-1])
    known = sorted({key for schema in _schemas(model, location[:-1]) for key in schema.get("properties", {})})
    if (usual := _OTHER_NAMES.get(name)) in known:
        return f"is not a known field; did you mean {usual}?"
    if hint := _nearest(name, known):
        return f"is not a known field{hint}"
    elsewhere = [path for path in _fields(model) if path[-1] == name and path != location[: len(path)]]
    if elsewhere:
        nearest = max(elsewhere, key=lambda path: [a == b for a, b in zip(path, location, strict=False)])
        return f"is not a known field here; did you mean {path_of(nearest)}?"
    return f"is not a known field; known fields are {', '.join(known)}"


# Fields and descriptions, read from the model's JSON schema


def _alternatives(model: type[BaseModel], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema, and first the schemas that its reference or the members of its union resolve to."""
    if reference := schema.get("$ref"):
        name = reference.removeprefix("#/$defs/")
        yield from _alternatives(model, json_schema(model)["$defs"][name])
    for member in schema.get("anyOf", []):
        yield from _alternatives(model, member)
    yield schema


def _schemas(model: type[BaseModel], location: Location) -> list[dict[str, Any]]:
    """Return the schemas of a field, one for each allowed type."""
    current = list(_alternatives(model, json_schema(model)))
    for part in location:
        inner = [
            schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
            for schema in current
        ]
        current = [found for schema in inner if schema for found in _alternatives(model, schema)]
    return current


def _description(model: type[BaseModel], location: Location) -> str:
    """Return the field's own description, or that of its type, on one line."""
    found = [schema["description"] for schema in _schemas(model, location) if "description" in schema]
    return " ".join(str(found[-1]).split()) if found else ""


@cache
def _fields(model: type[BaseModel]) -> list[Location]:
    """Return all fields outside lists, the shallowest first."""
    found: list[Location] = []
    level: list[tuple[Location, dict[str, Any]]] = [((), json_schema(model))]
    while level:
        below = [
            ((*path, name), inner)
            for path, schema in level
            for alternative in _alternatives(model, schema)
            for name, inner in alternative.get("properties", {}).items()
        ]
        found += [path for path, _ in below]
        level = below
    return found
