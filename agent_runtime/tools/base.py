"""The tool interface: a name, a schema and an async `execute`; and how the engine executes the model's calls.

Schemas are derived from signatures. Arguments are checked, and errors in a call are explained to the model.
"""

import functools
import inspect
import json
import re
import time
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Union, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from agent_runtime.extensions import contained, described, nearest, traceback_of
from agent_runtime.models.base import ToolCall
from agent_runtime.sandboxes.base import (
    CommandResult,
    Fenced,
    FileStat,
    Output,
    ProcessStatus,
    SandboxFailure,
    WorkspaceLimit,
)
from rollout_api.nesting import as_recorded, record_json
from rollout_api.records import Observation
from rollout_api.tasks import Task


class ToolWorkspace(Protocol):
    """The attempt's workspace for a tool: every call automatically gets the next idempotency key of this tool call.

    If a tool makes the same calls in the same order when it is repeated after a crash, no call is executed twice.
    """

    working_dir: str

    async def run(
        self,
        command: str | list[str],
        *,
        deadline_seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        head_bytes: int = 16_384,
        tail_bytes: int = 16_384,
    ) -> CommandResult:
        """Run a command; the deadline is at most, and by default, the task's `commandSeconds`."""

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return a file's content. Raises FileError."""

    async def write(self, path: str, data: bytes, *, mode: str = "644") -> None:
        """Write a file, creating its parents. Raises FileError."""

    async def remove(self, path: str) -> None:
        """Remove a file or a folder."""

    async def stat(self, path: str) -> FileStat | None:
        """Return the entry at a path; None if the path does not exist."""

    async def list(self, path: str) -> list[FileStat]:
        """Return the entries of a folder. Raises FileError."""


@runtime_checkable
class ToolProcesses(Protocol):
    """Processes that a tool keeps in the workspace between its calls; see `LiveProcesses`. Keys are added
    automatically.
    """

    call: str
    """Name of this tool call, unique in the attempt and the same if it is repeated."""

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        label: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        """Start a process; return its id, which ends with `label`."""

    async def processes(self) -> Sequence[tuple[str, bool]]:
        """Return (id, whether it runs) of each process."""

    async def process(self, process: str) -> ProcessStatus | None:
        """Return the process's state at the first call."""

    async def process_now(self, process: str) -> ProcessStatus | None:
        """Return its current state, also if the call is repeated."""

    async def write_input(self, process: str, offset: int, data: bytes) -> None:
        """Write to its input."""

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        """Return its output from the cursor on. A repeated call may return more."""


def live_processes(workspace: object) -> ToolProcesses:
    """Return a workspace's processes. Raises ToolError if its provider does not support them."""
    if not isinstance(workspace, ToolProcesses):
        raise ToolError("This sandbox cannot keep a process between calls.")
    return workspace


@dataclass(frozen=True)
class ToolContext:
    """Objects that a tool call may use."""

    workspace: ToolWorkspace
    task: Task
    call_id: str
    seconds_left: float
    """Remaining time of the agent."""


@dataclass(frozen=True)
class ToolResult:
    """Text for the model, and data for machines. `stop` ends the rollout as Finished."""

    content: str
    error: bool = False
    stop: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)


class ToolError(Exception):
    """Raised by a tool; the message explains to the model what was wrong with its call."""


@runtime_checkable
class Tool(Protocol):
    """A tool. `parameters` is the JSON schema of the arguments, which are checked before `execute`."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def runs_in(self) -> Literal["Sandbox", "Runner"]:
        """Return where it runs; may be a plain attribute."""

    @property
    def idempotent(self) -> bool:
        """Whether a `Runner` tool may be run again after a crash. If not, the model is informed that the outcome is
        unknown.
        """

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run the tool. Raise ToolError for mistakes of the model; other exceptions are reported to it as the tool's
        failure.
        """


def takes_agents_time(tool: Tool | None) -> bool:
    """Whether the tool's time counts as the agent's: yes, unless the tool's attribute `takes_agents_time` is False."""
    return bool(getattr(tool, "takes_agents_time", True))


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


ToolFunction = Callable[..., Awaitable[str | ToolResult | dict[str, Any] | list[Any]]]


class FunctionTool:
    """A `Tool` from an async function; its schema comes from the signature, its description from the docstring.

    A parameter annotated as ToolContext gets the context of the call. The function returns a ToolResult, text, or a
    JSON value, which the model reads as JSON.
    """

    def __init__(
        self,
        function: ToolFunction,
        *,
        name: str | None = None,
        runs_in: Literal["Sandbox", "Runner"] = "Sandbox",
        idempotent: bool = False,
    ) -> None:
        if not inspect.iscoroutinefunction(function):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(f"a tool must be an async function, but {name} is not; use `async def`")
        signature = Signature(function)
        self.name = name or function.__name__
        self.description = signature.description
        self.parameters: Mapping[str, Any] = signature.schema
        self.runs_in, self.idempotent = runs_in, idempotent
        self._function, self._signature = function, signature

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Check the arguments and call the function. Raises ArgumentsError, and the function's errors."""
        bound = self._signature.bind(arguments)
        if self._signature.context_parameter is not None:
            bound[self._signature.context_parameter] = context
        returned = await self._function(**bound)
        if isinstance(returned, ToolResult):
            return returned
        if isinstance(returned, dict | list):
            # default=str: a date or a path inside must not fail the call.
            return ToolResult(json.dumps(returned, ensure_ascii=False, default=str))
        return ToolResult(str(returned))


def as_tool(thing: Any, name: str) -> Tool:
    """Return a tool from a tool, a class of tools, or a plain async function. Raises TypeError."""
    made: Any = thing() if inspect.isclass(thing) else thing
    if inspect.iscoroutinefunction(made):
        made = FunctionTool(made)
    missing = [
        part
        for part in ("name", "description", "parameters", "runs_in", "idempotent", "execute")
        if not hasattr(made, part)
    ]
    if missing:
        raise TypeError(f"tool {name!r} is {thing!r}, which lacks {', '.join(missing)}; see docs/agents-and-tools.md")
    if not inspect.iscoroutinefunction(made.execute):
        raise TypeError(f"tool {name!r}: execute must be async")
    tool: Tool = made
    return tool


OBSERVATION_BYTES = 64 * 1024
"""Most bytes of one observation: about 16,000 tokens, half of a small model's context."""

FORMAT_ERROR = "formatError"
"""Key in `Observation.data` of an invalid call: UnknownTool, MalformedJson or InvalidArguments."""


async def dispatch(tools: Mapping[str, Tool], call: ToolCall, context: ToolContext) -> Observation:
    """Run one tool call. Errors of the model or the tool become an observation with `error` set.

    Raises errors that concern the attempt instead of this call: SandboxFailure, WorkspaceLimit, Fenced, cancellation.
    """
    started = time.monotonic()
    traceback = None
    try:
        result = await _result(tools, call, context)
        if not isinstance(result, ToolResult) or not isinstance(result.content, str):
            raise TypeError(f"it returned {result!r:.200}; expected a ToolResult with text")
    except (SandboxFailure, WorkspaceLimit, Fenced):
        raise
    except Exception as error:  # noqa: BLE001 - a tool may raise anything; the error is reported to the model
        result = ToolResult(f"The tool {call.name} failed with {described(error)}", error=True)
        traceback = traceback_of(error)
    try:
        data = as_recorded(json.loads(record_json(dict(result.data))))
    except (TypeError, ValueError) as error:
        data = {}
        message = f"the data that the tool returned was left out: {error}"
        result = ToolResult(f"{result.content}\n({message})", result.error, result.stop)
    return Observation(
        call_id=call.id,
        tool=call.name,
        content=shortened(result.content),
        error=bool(result.error),
        stop=bool(result.stop),
        seconds=time.monotonic() - started,
        data=data,
        traceback=traceback,
    )


async def _result(tools: Mapping[str, Tool], call: ToolCall, context: ToolContext) -> ToolResult:
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tools) or "none"
        return _format_error(
            "UnknownTool", f"There is no tool named {call.name!r}{nearest(call.name, tools)}. The tools are: {known}."
        )
    try:
        arguments = decoded_arguments(call.arguments)
    except ValueError as error:
        return _format_error("MalformedJson", str(error))
    try:
        if not isinstance(tool, FunctionTool):  # a FunctionTool checks them by its signature
            arguments = checked_arguments(tool.parameters, arguments)
        with contained():
            return await tool.execute(arguments, context)
    except ArgumentsError as error:
        return _format_error("InvalidArguments", f"The arguments of {call.name} are not valid.\n{error}")
    except ToolError as error:
        return ToolResult(str(error), error=True)


def _format_error(kind: str, message: str) -> ToolResult:
    return ToolResult(message, error=True, data={FORMAT_ERROR: kind})


def decoded_arguments(text: str) -> dict[str, Any]:
    """Return the object in a call's arguments; empty arguments count as an empty object. Raises ValueError with a
    readable message.

    Line breaks inside strings are accepted, because models write them.
    """
    if not text.strip():
        return {}
    try:
        arguments = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 30) : error.pos + 30]
        raise ValueError(
            f"The arguments are not valid JSON: {error.msg} at character {error.pos}, near {around!r}. "
            "Send one complete JSON object."
        ) from None
    except RecursionError:
        raise ValueError("The arguments are nested too deeply. Send a flatter JSON object.") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"The arguments must be a JSON object, got {text[:60]!r}.")
    if "\\ud" in text.lower():
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("The JSON arguments have an unpaired surrogate. Write whole characters.") from None
    return arguments


def shortened(text: str, limit: int = OBSERVATION_BYTES) -> str:
    """Return text of at most about `limit` bytes of UTF-8: beginning and end, with a note of how much is left out."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    half = limit // 2
    head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    omitted = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[… {omitted} bytes omitted …]\n{tail}"
