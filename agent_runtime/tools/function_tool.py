"""The decorator that makes a tool from an async function or a class."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from agent_runtime.tools.base import Tool, ToolContext, ToolResult
from agent_runtime.tools.schema import Signature

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
            raise TypeError(f"a tool must be an async function, but {function!r} is not; use `async def`")
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
