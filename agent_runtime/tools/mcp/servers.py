"""The MCP servers of one attempt. They are started once and list their tools once, which is recorded for later runners."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.types import PaginatedRequestParams, Tool

from agent_runtime.sandboxes.base import FileError, SandboxFailure
from agent_runtime.tools.base import ToolError, ToolProcesses
from agent_runtime.tools.mcp.http import HttpSession
from agent_runtime.tools.mcp.stdio import connect
from agent_runtime.tools.mcp.tool import McpTool, last_words
from rollout_api.records import McpRecord
from rollout_api.rollout_job import McpServer

START_SECONDS = 60.0
"""Time limit for a server to start and list its tools. Downloads by npx or uvx take up to half of it."""
PAGES = 100
"""Limit of pages of one listing, in case a server always returns another page."""


class McpServers:
    """Implements the engine's interface to the servers of `agent.mcpServers`."""

    def __init__(self, servers: Sequence[McpServer], api_keys: Mapping[str, str]) -> None:
        self._servers = servers
        self._http = {
            server.name: HttpSession(server.url, api_keys.get(server.name))
            for server in servers
            if server.url is not None
        }

    async def introduce(self, processes: Callable[[str], ToolProcesses]) -> list[McpRecord]:
        """Start and initialise them. `processes` returns the workspace for a server's name.

        Raises SandboxFailure("McpServerFailed"), because the policy cannot have caused a failure at this time.
        """
        return [await self._introduced(server, processes) for server in self._servers]

    def tools(self, records: Sequence[McpRecord]) -> list[McpTool]:
        wanted = {server.name: server.tools for server in self._servers}
        return [
            McpTool(record, definition, self._http.get(record.server))
            for record in records
            for definition in record.tools
            if (names := wanted.get(record.server)) is None or definition["name"] in names
        ]

    async def close(self) -> None:
        """End HTTP sessions; a server in a workspace ends with the workspace."""
        for session in self._http.values():
            await session.close()

    async def _introduced(self, server: McpServer, processes: Callable[[str], ToolProcesses]) -> McpRecord:
        try:
            async with asyncio.timeout(START_SECONDS):
                if (http := self._http.get(server.name)) is not None:
                    session = await http.open()
                    record, problem = await _listed(session, server.name, None)
                else:
                    record, problem = await _start(server, processes(server.name))
        except TimeoutError:
            raise _failed(server, f"it did not list its tools within {START_SECONDS:.0f} s") from None
        except (FileError, ToolError, OSError, MCPError, ExceptionGroup, RuntimeError, ValueError) as error:
            raise _failed(server, f"{type(error).__name__}: {error}") from error
        if record is None:
            raise _failed(server, problem)
        missing = sorted(set(server.tools or ()) - {tool["name"] for tool in record.tools})
        if missing:
            has = ", ".join(tool["name"] for tool in record.tools)
            raise _failed(server, f"it has no tool named {', '.join(missing)}; it has {has}")
        return record


async def _start(server: McpServer, processes: ToolProcesses) -> tuple[McpRecord | None, str]:
    process = await processes.start_process(server.command, label=f"mcp-{server.name}")
    status = await processes.process(process)
    assert status is not None  # it was just started, so it is not forgotten
    async with connect(processes, status, processes.call) as streams, ClientSession(*streams) as session:
        record, problem = await _listed(session, server.name, process)
    if record is None and (now := await processes.process_now(process)) is not None:
        problem += last_words(now)
    return record, problem


async def _listed(session: ClientSession, name: str, process: str | None) -> tuple[McpRecord | None, str]:
    """Return the server's introduction, or the error. The error is not raised inside the SDK's task group, which would
    wrap it.
    """
    try:
        initialized = await session.initialize()
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(PAGES):
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                break
    except (MCPError, RuntimeError, ValueError) as error:
        return None, str(error)
    written = [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in tools]
    return McpRecord(
        server=name,
        process=process,
        initialized=initialized.model_dump(by_alias=True, mode="json", exclude_none=True),
        tools=written,
    ), ""


def _failed(server: McpServer, why: str) -> SandboxFailure:
    where = "in the sandbox" if server.command else f"at {server.url}"
    return SandboxFailure("McpServerFailed", f"agent.mcpServers {server.name} ({where}): {why}")
