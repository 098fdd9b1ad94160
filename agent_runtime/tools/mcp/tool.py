"""A tool of an MCP server as one of our tools."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED, CallToolRequest, CallToolRequestParams, CallToolResult, InitializeResult
from pydantic import ValidationError

from agent_runtime.executor.timing import working_timeout
from agent_runtime.sandboxes.base import ProcessStatus
from agent_runtime.tools.base import ToolContext, ToolError, ToolResult, live_processes
from agent_runtime.tools.mcp.http import HttpSession
from agent_runtime.tools.mcp.stdio import connect
from rollout_api.records import McpRecord

_LOST = ("Connection closed", "Session terminated")
"""The SDK's errors for calls of a session whose connection broke, or which the server has forgotten."""
STDERR_BYTES = 2000
"""Bytes of the final error output of a server that ended."""


class McpTool:
    """Implements `Tool`. `definition` is the tool in its server's list (MCP's `Tool`, JSON)."""

    def __init__(self, server: McpRecord, definition: Mapping[str, Any], http: HttpSession | None) -> None:
        self.name = tool_name(server.server, definition["name"])
        self.description = str(definition.get("description") or definition.get("title") or "")
        self.parameters: Mapping[str, Any] = definition["inputSchema"]
        self._server, self._tool, self._http = server, str(definition["name"]), http
        hints = definition.get("annotations") or {}
        self._repeatable = bool(hints.get("readOnlyHint") or hints.get("idempotentHint"))

    @property
    def runs_in(self) -> Literal["Sandbox", "Runner"]:
        """Return where it runs. A server in the workspace gets each request once; a remote one may have executed a
        request whose answer was lost.
        """
        return "Sandbox" if self._http is None else "Runner"

    @property
    def idempotent(self) -> bool:
        return self._repeatable

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        seconds = min(context.task.timeouts.command_seconds, context.seconds_left)
        request = CallToolRequest(params=CallToolRequestParams(name=self._tool, arguments=dict(arguments)))
        answer: CallToolResult | MCPError | ValidationError
        try:
            async with working_timeout(seconds), self._session(context) as session:
                # Do not raise it here, because the SDK's task group would wrap it.
                try:
                    answer = await session.send_request(request, CallToolResult)
                except (MCPError, ValidationError) as error:
                    answer = error
        except TimeoutError:
            raise ToolError(
                f"{self.name} did not answer within {seconds:.0f} s. The call may still be running."
            ) from None
        if isinstance(answer, CallToolResult):
            return result_of(answer)
        if isinstance(answer, ValidationError):
            raise ToolError(f"{self.name}: its server sent an invalid message: {answer.errors()[0]['msg']}")
        if self._http is not None and answer.message in _LOST:
            await self._http.lose(session)
        raise ToolError(f"{self.name}: {answer.message}{await self._ending(context, answer)}")

    @asynccontextmanager
    async def _session(self, context: ToolContext) -> AsyncIterator[ClientSession]:
        if self._http is not None:
            yield await self._http.open()
            return
        processes = live_processes(context.workspace)
        assert self._server.process is not None
        status = await processes.process(self._server.process)
        if status is None or not status.running:
            raise ToolError(f"{self.name}: its server has ended{last_words(status)}")
        async with connect(processes, status, processes.call) as streams, ClientSession(*streams) as session:
            session.adopt(InitializeResult.model_validate(self._server.initialized))
            yield session

    async def _ending(self, context: ToolContext, error: MCPError) -> str:
        if error.code != CONNECTION_CLOSED or self._server.process is None:
            return ""
        return last_words(await live_processes(context.workspace).process_now(self._server.process))


def tool_name(server: str, tool: str) -> str:
    """Return the model's name of a server's tool: characters that OpenAI's servers refuse in names become `_`."""
    return f"{server}__{''.join(c if c.isascii() and (c.isalnum() or c in '_-') else '_' for c in tool)}"


def result_of(result: CallToolResult) -> ToolResult:
    """Return a server's answer for the model. Content that is not text is named."""
    parts = [_named(block) if (text := getattr(block, "text", None)) is None else text for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [str(result.structured_content)]
    data = {} if result.structured_content is None else {"structuredContent": result.structured_content}
    return ToolResult("\n".join(parts), error=bool(result.is_error), data=data)


def _named(block: Any) -> str:
    resource = getattr(block, "resource", None)
    if (text := getattr(resource, "text", None)) is not None:
        return str(text)
    kind = getattr(block, "type", "content")
    about = getattr(block, "uri", None) or getattr(resource, "uri", None) or getattr(block, "mime_type", None)
    return f"[{kind}{f' {about}' if about else ''}, which cannot be shown as text]"


def last_words(status: ProcessStatus | None) -> str:
    """Return the end of a server's error output, as the end of a sentence."""
    said = "" if status is None else status.stderr[-STDERR_BYTES:].decode(errors="replace").strip()
    return f". Its last output: {said}" if said else ""
