"""MCP servers by HTTP that break off or forget their sessions, as after a restart or behind a load balancer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agent_runtime.tools.base import ToolError
from agent_runtime.tools.mcp.servers import McpServers
from rollout_api.rollout_job import McpServer

CONTEXT: Any = SimpleNamespace(
    task=SimpleNamespace(timeouts=SimpleNamespace(command_seconds=10)), seconds_left=60.0, workspace=None
)


class FaultyServer:
    """Has one tool, `ask`. It can break off the next call, or forget all its sessions."""

    def __init__(self) -> None:
        self.sessions = 0
        self.breaks_off = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] == "initialize":
            self.sessions += 1
            server = {"name": "faulty", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
            reply = self._result(message, result)
            reply.headers["Mcp-Session-Id"] = str(self.sessions)
            return reply
        if request.headers.get("Mcp-Session-Id") != str(self.sessions):
            return web.Response(status=404)
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "tools/list":
            return self._result(message, {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]})
        if self.breaks_off and request.transport is not None:
            self.breaks_off = False
            request.transport.abort()
        return self._result(message, {"content": [{"type": "text", "text": f"session {self.sessions}"}]})

    def _result(self, message: dict[str, Any], result: dict[str, Any]) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


@pytest.mark.parametrize("fault", ["its connection breaks", "it forgets its sessions"])
async def test_http_tool_works_again_after_its_session_is_lost(fault: str, unused_tcp_port: int) -> None:
    faulty = FaultyServer()
    app = web.Application()
    app.router.add_route("*", "/mcp", faulty.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    servers = McpServers([McpServer(name="x", url=f"http://127.0.0.1:{unused_tcp_port}/mcp")], {})
    try:
        (tool,) = servers.tools(await servers.introduce(lambda name: pytest.fail("it is not in the sandbox")))
        assert (await tool.execute({}, CONTEXT)).content == "session 1"
        if fault == "its connection breaks":
            faulty.breaks_off = True
        else:
            faulty.sessions += 1
        lost = await asyncio.gather(*(tool.execute({}, CONTEXT) for _ in range(3)), return_exceptions=True)
        assert any(isinstance(one, ToolError) for one in lost), lost
        again = await asyncio.gather(*(tool.execute({}, CONTEXT) for _ in range(3)))
        assert len({one.content for one in again}) == 1, "one session for all calls"
    finally:
        await servers.close()
        await runner.cleanup()
