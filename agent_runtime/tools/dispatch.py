"""Executes a tool call as the model wrote it and returns an observation. Errors in the call are explained to the model."""

import json
import time
from collections.abc import Mapping
from typing import Any

from agent_runtime.extensions import contained, described, nearest, traceback_of
from agent_runtime.models.base import ToolCall
from agent_runtime.sandboxes.base import Fenced, SandboxFailure, WorkspaceLimit
from agent_runtime.tools.base import Tool, ToolContext, ToolError, ToolResult
from agent_runtime.tools.function_tool import FunctionTool
from agent_runtime.tools.schema import ArgumentsError, checked_arguments
from rollout_api.nesting import record_json
from rollout_api.records import Observation

OBSERVATION_BYTES = 64 * 1024
"""Most bytes of one observation: about 16,000 tokens, half of a small model's context."""

FORMAT_ERROR = "formatError"
"""Key in `Observation.data` of an invalid call: UnknownTool, MalformedJson or InvalidArguments."""

_TRACEBACK_BYTES = 8192


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
        traceback = shortened(traceback_of(error), _TRACEBACK_BYTES)
    try:
        data = json.loads(record_json(dict(result.data)))
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
