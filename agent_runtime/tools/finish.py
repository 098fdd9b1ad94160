"""Say that the work is done."""

from functools import partial
from typing import Annotated

from agent_runtime.tools.base import FunctionTool, ToolResult


@partial(FunctionTool, runs_in="Runner", idempotent=True)
async def finish(message: Annotated[str, "What was done, or the answer to the task."] = "") -> ToolResult:
    """End the work on the task. Call this when the task is solved, or when nothing more can be done."""
    return ToolResult(message or "Done.", stop=True)
