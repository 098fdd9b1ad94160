"""Tools by the names that a manifest uses."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

from agent_runtime.extensions import ExtensionError, Registry, create
from agent_runtime.tools.base import FunctionTool, Tool, ToolFunction, as_tool

COMMANDS_AND_FILES = ("execute_command", "write_file", "read_file", "mark_done")

TOOL_SETS = {"commands-and-files": COMMANDS_AND_FILES}
"""Names of sets of several tools."""

registry = Registry(
    "tool",
    "agent_rollouts.tools",
    {
        name: f"agent_runtime.tools.{name}:{name}"
        for name in ("bash", "calculator", "editor", "search", "finish", "terminal")
    }
    | {name: f"agent_runtime.tools.commands_and_files:{name}" for name in COMMANDS_AND_FILES},
)

AnyTool = TypeVar("AnyTool", bound=type[Any])


@overload
def tool(thing: AnyTool) -> AnyTool: ...
@overload
def tool(thing: ToolFunction) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, runs_in: Literal["Sandbox", "Runner"] = "Sandbox", idempotent: bool = False
) -> Callable[[ToolFunction], FunctionTool]: ...
def tool(
    thing: Any = None,
    *,
    name: str | None = None,
    runs_in: Literal["Sandbox", "Runner"] = "Sandbox",
    idempotent: bool = False,
) -> Any:
    """Register an async function, or a class of tools, by its name in this process.

    A function becomes a FunctionTool; a class, which has its own name, is returned unchanged. Raises TypeError if a
    schema cannot be derived, ExtensionError for the name of a built-in.
    """
    if thing is None:
        return lambda function: _registered(FunctionTool(function, name=name, runs_in=runs_in, idempotent=idempotent))
    if isinstance(thing, type):
        registry.register(as_tool(thing, thing.__name__).name, thing)
        return thing
    return _registered(FunctionTool(thing))


def _registered(made: FunctionTool) -> FunctionTool:
    registry.register(made.name, made)
    return made


def open_tools(names: Sequence[str], own: Mapping[str, Tool] = MappingProxyType({})) -> dict[str, Tool]:
    """Return the tools of a manifest by the names that the model sees, with sets expanded, in order. Raises
    ExtensionError.

    Names in `own` refer to the tools there.
    """
    tools: dict[str, Tool] = {}
    origins: dict[str, str] = {}
    for name in names:
        for member in TOOL_SETS.get(name, (name,)):
            made = own.get(member) or _made(registry.find(member), member)
            if made.name in tools:
                raise ExtensionError(
                    f"agent.tools: {origins[made.name]} and {name} both provide a tool named {made.name!r}; remove one"
                )
            tools[made.name], origins[made.name] = made, name
    return tools


def _made(thing: Any, name: str) -> Tool:
    if inspect.isclass(thing):
        thing = create("tool", name, thing)
    try:
        return as_tool(thing, name)
    except TypeError as error:
        raise ExtensionError(str(error)) from error
