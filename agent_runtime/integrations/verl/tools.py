"""verl's own tools as tools of this engine: `BaseTool` classes from their tool config, and `@function_tool` functions."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from verl.experimental.agent_loop.tool_agent_loop import AgentData  # type: ignore[import-not-found]
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return  # type: ignore[import-not-found]
from verl.tools.tool_registry import load_all_tools  # type: ignore[import-not-found]

from agent_runtime.tools.base import ToolContext, ToolResult
from agent_runtime.tools.registry import registry
from rollout_api.tasks import Task

ToolsKwargs = Callable[[Task], Mapping[str, Any]]
"""verl's `tools_kwargs` of a task: `{tool: {"create_kwargs": {...}}}`."""


def no_kwargs(task: Task) -> Mapping[str, Any]:
    return {}


class VerlTool:
    """A `Tool`. As in verl, a `BaseTool` is created, executed and released with every call."""

    runs_in: Literal["Runner"] = "Runner"
    idempotent = False

    def __init__(self, tool: Any, tools_kwargs: ToolsKwargs = no_kwargs) -> None:
        function = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
        self.name: str = tool.name
        self.description: str = function["description"]
        self.parameters: Mapping[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
        self._tool, self._tools_kwargs = tool, tools_kwargs

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Call the tool. Reward and metrics of the call are in the result's data. Raises the tool's errors."""
        if isinstance(self._tool, FunctionTool):
            response, reward, metrics = normalize_function_tool_return(await self._tool.call(dict(arguments)))
        else:
            response, reward, metrics = await self._execute(dict(arguments), context)
        if response.image or response.video:
            return ToolResult(f"{self.name} returned an image or video, but only text is supported.", error=True)
        data = {"reward": reward, "metrics": metrics}
        return ToolResult(response.text or "", data=json.loads(json.dumps(data, default=_plain)))

    async def _execute(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Any, Any, Any]:
        every = dict(self._tools_kwargs(context.task))
        agent_data = AgentData(
            messages=[{"role": "user", "content": context.task.prompt}],
            image_data=None,
            video_data=None,
            audio_data=None,
            mm_processor_kwargs=None,
            metrics={},
            request_id=context.call_id,
            tools_kwargs=every,
        )
        create_kwargs = (every.get(self.name) or {}).get("create_kwargs") or {}
        instance, _ = await self._tool.create(create_kwargs=create_kwargs)
        try:
            response, reward, metrics = await self._tool.execute(instance, arguments, agent_data=agent_data)
        finally:
            await self._tool.release(instance)
        return response, reward, metrics


def register_tools(
    tool_config_path: str | None = None, function_tool_path: str | None = None, tools_kwargs: ToolsKwargs = no_kwargs
) -> list[str]:
    """Register the tools of verl's config files by name in this process. Returns the names, for `agent.tools`.

    Raises ExtensionError for the name of a built-in, and verl's own errors for its files.
    """
    return register_loaded(load_all_tools(tool_config_path, function_tool_path), tools_kwargs)


def register_loaded(tools: list[Any], tools_kwargs: ToolsKwargs = no_kwargs) -> list[str]:
    """Like `register_tools`, for tools that verl has already loaded."""
    for tool in tools:
        registry.register(tool.name, VerlTool(tool, tools_kwargs))
    return [tool.name for tool in tools]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
