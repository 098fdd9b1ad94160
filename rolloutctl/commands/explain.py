"""`rolloutctl explain`: what a field of a manifest means, like `kubectl explain` and without a cluster."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.text import Text

from rollout_api.crd import definitions
from rolloutctl.errors import CommandError, did_you_mean
from rolloutctl.ui.console import Form, FormOption, answer_described, answer_json, out

Schema = Mapping[str, Any]

DEFAULT_KIND = "RolloutJob"
MOST_SIMILAR = 8


def complete_field(incomplete: str) -> list[str]:
    """Return the paths that go on from an unfinished one: kinds and fields of the next level."""
    above = incomplete.rpartition(".")[0]
    try:
        _, schema = _find(above)
    except CommandError:
        return []
    names = [f"{above}." * bool(above) + name for name in _fields(schema)]
    return [name for name in [*names, *(_kinds() if not above else ())] if name.startswith(incomplete)]


def explain(
    field: Annotated[
        str,
        typer.Argument(
            help="A path such as sandbox.resources, or of another kind: ModelServer.engine.",
            autocompletion=complete_field,
        ),
    ] = DEFAULT_KIND,
    form: FormOption = Form.TEXT,
) -> None:
    """Explain a field of a manifest: its meaning, its form, its default, and the fields in it."""
    path, schema = _find(field)
    if form is Form.JSON:
        answer_json(schema)
        return
    heading = Text(path, "bold")
    heading.append(f"   {_form_of(schema)}", "")
    if "default" in schema:
        heading.append(f", default {_value(schema['default'])}")
    out.print(heading, soft_wrap=True)
    out.print(Text(schema.get("description", "")), soft_wrap=True)
    fields, required = _fields(schema), _inner(schema).get("required", ())
    rows = [
        [
            name,
            _form_of(inner),
            "required" if name in required else _value(inner["default"]) if "default" in inner else "",
            inner.get("description", "").split("\n\n")[0],
        ]
        for name, inner in fields.items()
    ]
    if rows:
        answer_described("", ["field", "form", "default", "meaning"], rows)


def _kinds() -> dict[str, Schema]:
    """Return the schema of each kind's spec; kinds without one are not written by people."""
    found: dict[str, Schema] = {}
    for definition in definitions().values():
        (version,) = definition["spec"]["versions"]
        whole = version["schema"]["openAPIV3Schema"]
        if "spec" in whole["properties"]:
            found[definition["spec"]["names"]["kind"]] = {
                **whole["properties"]["spec"],
                "description": whole["description"],
            }
    return found


def _find(path: str) -> tuple[str, Schema]:
    """Return the path with its kind, and the schema there. Raises CommandError."""
    kinds = _kinds()
    # "[]" is how messages and docs/manifest.md name the entries of a list.
    names = [name for part in path.split(".") if (name := part.removesuffix("[]"))]
    kind = names.pop(0) if names and names[0] in kinds else DEFAULT_KIND
    if names and names[0] == "spec":
        names.pop(0)
    schema, found = kinds[kind], kind
    for name in names:
        fields = _fields(schema)
        if name not in fields:
            known = f"it has {', '.join(fields)}" if fields else "it has no fields"
            similar = did_you_mean(name, [*fields, *(kinds if found in kinds else ())])
            raise CommandError(f"{found} has no field {name!r}; {known}.{similar}{_elsewhere(name, kind, kinds[kind])}")
        schema, found = fields[name], f"{found}.{name}"
    return found, schema


def _elsewhere(name: str, kind: str, schema: Schema) -> str:
    """Return a sentence with the paths of fields with this or a similar name in a kind; empty if there are none."""
    by_name: dict[str, list[str]] = {}
    for path in _paths(kind, schema):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    found = by_name.get(name) or [path for close in get_close_matches(name, by_name, n=1) for path in by_name[close]]
    return f" Fields with this or a similar name: {', '.join(found[:MOST_SIMILAR])}." if found else ""


def _paths(path: str, schema: Schema) -> Iterator[str]:
    for name, inner in _fields(schema).items():
        yield f"{path}.{name}"
        yield from _paths(f"{path}.{name}", inner)


def _inner(schema: Schema) -> Schema:
    """Return the schema of a list's or mapping's entries, or else the schema itself."""
    inner: Any = schema.get("items") or schema.get("additionalProperties")
    return inner if isinstance(inner, Mapping) else schema


def _fields(schema: Schema) -> dict[str, Schema]:
    return _inner(schema).get("properties") or {}


def _form_of(schema: Schema) -> str:
    match schema.get("type"):
        case "array":
            return f"list of {_form_of(schema['items'])}"
        case "object" if schema.get("additionalProperties"):
            return f"mapping of names to {_form_of(_inner(schema))}"
        case "object":
            return "mapping"
        case "boolean":
            return "true or false"
        case "string":
            return " | ".join(schema["enum"]) if "enum" in schema else "text"
        case "integer" | "number" as kind:
            least, most = schema.get("minimum"), schema.get("maximum")
            if least is None:
                return str(kind)
            return f"{kind} from {least}" if most is None else f"{kind} {least}…{most}"
        case _:
            return "text or list" if "minItems" in schema else "any"


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case [] | {}:
            return "empty"
        case _:
            return str(value)
