"""Tools for the agents of this package, created by name or from user objects, and prompts that describe tools."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from agent_runtime.tools.base import FunctionTool, Tool, ToolContext, ToolResult, as_tool, takes_agents_time
from agent_runtime.tools.registry import registry

NAMES = {
    "BashExecutor": "bash",
    "FileEditor": "editor",
    "Search": "search",
    "Calculator": "calculator",
    "Finish": "finish",
}
"""Built-in tools by agentic-rollout-library's names."""

_LOCATION_OPTIONS = {"execution_mode", "pod_name", "namespace", "kubeconfig_path"}
"""Options of agentic-rollout-library that select where a tool runs. They are not supported."""


class ToolWithOptions:
    """A tool with changed defaults of some arguments. Raises ValueError for an unknown argument."""

    def __init__(self, tool: Tool, options: Mapping[str, Any]) -> None:
        properties: dict[str, Any] = dict(tool.parameters.get("properties", {}))
        if _LOCATION_OPTIONS & set(options):
            raise ValueError(
                f"{tool.name}: {', '.join(sorted(_LOCATION_OPTIONS & set(options)))}: not supported, because a tool works "
                "in its agent's sandbox. For a sandbox that is a pod, give the agent sandbox={'provider': 'Kodo', "
                "'kodo': {'backend': 'Kubernetes'}} (docs/images-on-a-laptop.md), or apply a RolloutJob to a cluster "
                "(docs/first-job.md)"
            )
        if unknown := sorted(set(options) - set(properties)):
            raise ValueError(
                f"{tool.name} has no option {', '.join(unknown)}; its options are its arguments: {', '.join(properties)}"
            )
        changed = {name: {**properties[name], "default": value} for name, value in options.items()}
        required = [name for name in tool.parameters.get("required", []) if name not in options]
        self.name, self.description = tool.name, tool.description
        self.parameters = {**tool.parameters, "properties": properties | changed, "required": required}
        self.runs_in, self.idempotent, self.takes_agents_time = tool.runs_in, tool.idempotent, takes_agents_time(tool)
        self._tool, self._options = tool, dict(options)

    def get_description(self) -> str:
        """Return the tool's description with its arguments, for a prompt."""
        return f"{self.description} Arguments, as a JSON schema: {json.dumps(self.parameters)}"

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        return await self._tool.execute({**self._options, **arguments}, context)


def create_tool(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Create a tool by its name in a manifest, or by agentic-rollout-library's name for it.

    `options` are the constructor's arguments for a registered class. For other tools they are defaults of the tool's
    arguments. Raises ExtensionError, ValueError.
    """
    found = registry.find(NAMES.get(name, name))
    if inspect.isclass(found):
        return found(**options or {})
    return ToolWithOptions(as_tool(found, name), options or {})


def create_tools(tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Create several tools, given their options by name."""
    return {NAMES.get(name, name): create_tool(name, options) for name, options in tools.items()}


def described(name: str, tool: Any) -> str:
    """Return a tool's name and description, for a prompt."""
    description = tool.get_description() if hasattr(tool, "get_description") else getattr(tool, "description", "")
    return f"{name}: {description}".rstrip(": ")


class NamedTool:
    """A `Tool` with the agent's name for it, created from a tool, an object with `execute(...)`, or an async function.

    `get_description()` of the object, if it exists, returns the description. `stops`: whether a successful call ends the
    run. Raises TypeError for other objects.
    """

    def __init__(self, name: str, thing: Any, *, stops: bool) -> None:
        tool = _as_tool(name, thing)
        self.name, self.description, self.parameters = name, tool.description, tool.parameters
        if not isinstance(thing, ToolWithOptions) and hasattr(thing, "get_description"):
            self.description = thing.get_description()
        self.runs_in, self.idempotent, self.takes_agents_time = tool.runs_in, tool.idempotent, takes_agents_time(tool)
        self._tool, self._stops = tool, stops

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        result = await self._tool.execute(arguments, context)
        return replace(result, stop=self._stops and not result.error)


def _as_tool(name: str, thing: Any) -> Tool:
    execute = getattr(thing, "execute", None)
    if execute is None or inspect.isclass(thing) or hasattr(thing, "parameters"):
        return as_tool(thing, name)
    tool = FunctionTool(execute, name=name, runs_in="Runner")
    tool.description = tool.description or getattr(thing, "description", "") or inspect.getdoc(type(thing)) or ""
    return tool


class PromptBuilder:
    """Builds a prompt from an optional opening and sections. `{name}` in them is replaced by the variable `name`."""

    def __init__(self, opening: str = "") -> None:
        self._opening = opening
        self._variables: dict[str, Any] = {}
        self._sections: list[str] = []

    def add_variable(self, name: str, value: object) -> Self:
        """Set the value of `{name}`."""
        self._variables[name] = value
        return self

    def add_section(self, title: str, content: str) -> Self:
        """Add a section with a title and a body."""
        self._sections.append(f"{title}:\n{content}")
        return self

    def add_tools(self, tools: Mapping[str, Any], formatter: Callable[[str, Any], str] = described) -> Self:
        """Add a section that describes tools, each by `formatter(name, tool)`."""
        return self.add_section("Available Tools", "\n\n".join(formatter(name, tool) for name, tool in tools.items()))

    def add_context(self, context: Mapping[str, object]) -> Self:
        """Add a section of facts."""
        return self.add_section("Context", "\n".join(f"- {name}: {value}" for name, value in context.items()))

    def build(self) -> str:
        """Return the prompt."""
        prompt = "\n\n".join(filter(None, [self._opening, *self._sections]))
        for name, value in self._variables.items():
            prompt = prompt.replace(f"{{{name}}}", str(value))
        return prompt
