"""Write a tool: an async function or a class, registered with `tool`."""

from agent_runtime.tools.base import FunctionTool, Tool, ToolContext, ToolResult
from agent_runtime.tools.registry import open_tools, registry, tool

__all__ = ["FunctionTool", "Tool", "ToolContext", "ToolResult", "open_tools", "registry", "tool"]
