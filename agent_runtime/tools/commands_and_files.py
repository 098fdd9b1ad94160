"""The tool set `commands-and-files`: commands, whole files, and the end of the work."""

from functools import partial
from typing import Annotated

from pydantic import Field

from agent_runtime.sandboxes.base import FileError
from agent_runtime.tools.base import FunctionTool, ToolContext, ToolError, ToolResult
from agent_runtime.tools.bash import run_command

READ_BYTES = 60 * 1024  # below an observation's limit, so that the note at the end is visible


@FunctionTool
async def execute_command(
    context: ToolContext,
    command: Annotated[str, "The shell command."],
    timeout: Annotated[float | None, Field(gt=0, description="Seconds after which it is ended.")] = None,
    working_directory: Annotated[str | None, "Where it runs; the task's working directory when left out."] = None,
) -> ToolResult:
    """Run a shell command in the sandbox and get its output and exit code."""
    return await run_command(context, command, timeout, working_directory)


@FunctionTool
async def write_file(
    context: ToolContext,
    filepath: Annotated[str, "Path, absolute or relative to the working directory."],
    content: Annotated[str, "The whole new content."],
) -> str:
    """Write a file, replacing what it had; missing folders are made."""
    data = content.encode(errors="replace")
    _check_path(filepath)
    try:
        await context.workspace.write(filepath, data)
    except FileError as error:
        raise ToolError(f"{filepath} could not be written: {error}") from error
    return f"Wrote {len(data)} bytes to {filepath}."


@FunctionTool
async def read_file(
    context: ToolContext, filepath: Annotated[str, "Path, absolute or relative to the working directory."]
) -> str:
    """Read a file."""
    _check_path(filepath)
    try:
        data = await context.workspace.read(filepath, limit=READ_BYTES + 1)
    except FileError as error:
        raise ToolError(f"{filepath} could not be read: {error}") from error
    text = data[:READ_BYTES].decode(errors="replace")
    if len(data) > READ_BYTES:
        return f"{text}\n[only the first {READ_BYTES} bytes; see the rest with execute_command, for instance tail]"
    return text or f"[{filepath} is empty]"


def _check_path(path: str) -> None:
    if "\0" in path:
        raise ToolError("filepath has a NUL character, which file names cannot have")


@partial(FunctionTool, runs_in="Runner", idempotent=True)
async def mark_done(message: Annotated[str, "What was done."] = "") -> ToolResult:
    """Say that the task is done. Nothing can be done after this."""
    return ToolResult(message or "Done.", stop=True)
