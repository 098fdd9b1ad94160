"""Run a shell command in the sandbox."""

from typing import Annotated

from pydantic import Field

from agent_runtime.sandboxes.base import CommandResult
from agent_runtime.tools.base import FunctionTool, ToolContext, ToolError, ToolResult


async def run_command(
    context: ToolContext, command: str, timeout: float | None = None, working_directory: str | None = None
) -> ToolResult:
    """Run a command and report how it ended; `timeout` in seconds, at most the task's `commandSeconds`."""
    if "\0" in command or "\0" in (working_directory or ""):
        raise ToolError(
            "a command and its working directory cannot have NUL characters; write $'\\\\0' or printf '\\\\0'"
        )
    allowed = context.task.timeouts.command_seconds
    result = await context.workspace.run(
        # One stream, so that errors appear where they happened. On the same line, so that line numbers stay correct.
        f"exec 2>&1; {command}",
        deadline_seconds=min(timeout or allowed, allowed),
        cwd=working_directory,
    )
    return ToolResult(
        readable(result), data={"exitCode": result.exit_code, "signal": result.signal, "cause": result.cause}
    )


def readable(result: CommandResult) -> str:
    """Return the output of a command, and how it ended."""
    output = "\n".join(part for part in (_text(result, "stdout"), _text(result, "stderr")) if part)
    ending = how_it_ended(result)
    return f"{output}\n[{ending}]" if output else f"[{ending}, no output]"


def how_it_ended(result: CommandResult) -> str:
    if result.cause == "Deadline":
        return (
            f"timed out after {result.seconds:.0f} s: the command and everything that it started was ended; "
            "run long work in the background with its output in a file, or in smaller steps"
        )
    if result.cause is not None:
        return f"ended by the sandbox: {result.cause}"
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    return f"exit code {result.exit_code}"


def _text(result: CommandResult, stream: str) -> str:
    data: bytes = getattr(result, stream)
    omitted: int = getattr(result, f"{stream}_omitted")
    if not omitted:
        return data.decode(errors="replace").rstrip("\n")
    gap: int = getattr(result, f"{stream}_head")
    head, tail = data[:gap].decode(errors="replace"), data[gap:].decode(errors="replace")
    return f"{head}\n[… {omitted} bytes omitted …]\n{tail}".rstrip("\n")


@FunctionTool
async def bash(
    context: ToolContext,
    command: Annotated[str, "The command; several lines are fine."],
    timeout: Annotated[
        float | None, Field(gt=0, description="Seconds after which it is ended; the task sets the longest.")
    ] = None,
) -> ToolResult:
    """Run a command in a shell in the sandbox. Every call starts a new shell in the working directory: files stay,
    `cd` and variables do not. Output and errors come back together, with the exit code."""
    return await run_command(context, command, timeout)
