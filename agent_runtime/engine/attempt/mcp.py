"""The MCP servers of an attempt. Imported only for jobs with servers, because they need the SDK."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent_runtime.engine.attempt.tool_calls import KeyedWorkspace
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.api_key import NoKey, read_api_key
from agent_runtime.sandboxes.base import SandboxFailure, Workspace
from agent_runtime.tools.base import Tool
from rollout_api.keys import mcp_key_variable
from rollout_api.records import AttemptRecord, McpRecord, Record
from rollout_api.rollout_job import Agent as AgentSpec

if TYPE_CHECKING:
    from agent_runtime.tools.mcp.servers import McpServers


def server_keys(spec: AgentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return keys of the servers that need one, by name. Raises ExtensionError if a job's servers cannot be used."""
    if not spec.mcp_servers:
        return {}
    try:
        import mcp.client.session  # noqa: F401
    except ImportError as error:
        raise ExtensionError(
            f"agent.mcpServers needs the MCP SDK ({error}): pip install 'agent-rollouts[mcp]'"
        ) from None
    try:
        return {
            server.name: read_api_key(
                server.api_key_from,
                environ,
                mcp_key_variable(server.name),
                f"agent.mcpServers {server.name}.apiKeyFrom",
            )[0]
            for server in spec.mcp_servers
            if server.api_key_from is not None
        }
    except NoKey as error:
        raise ExtensionError(str(error)) from None


class AttemptTools:
    """The tools of one attempt: those of the manifest and of its MCP servers."""

    def __init__(self, spec: AgentSpec, tools: Mapping[str, Tool], server_keys: Mapping[str, str]) -> None:
        self.tools = dict(tools)
        self.introduced: list[McpRecord] = []
        self._servers: McpServers | None = None
        self._spec, self._server_keys = spec, server_keys

    async def open(self, workspace: Workspace, recorded: Sequence[Record], command_seconds: float) -> None:
        """Initialise the servers, unless an earlier runner has. Raises SandboxFailure."""
        if not self._spec.mcp_servers:
            return
        from agent_runtime.tools.mcp.servers import McpServers

        self._servers = McpServers(self._spec.mcp_servers, self._server_keys)
        earlier = [record for record in recorded if isinstance(record, AttemptRecord)]
        if earlier:
            self.introduced = earlier[-1].mcp
        else:
            self.introduced = await self._servers.introduce(
                lambda name: KeyedWorkspace(workspace, f"0:mcp-{name}", command_seconds)
            )
        for tool in self._servers.tools(self.introduced):
            if tool.name in self.tools:
                raise SandboxFailure("McpServerFailed", f"two tools are named {tool.name!r}; drop one of them")
            self.tools[tool.name] = tool

    async def close(self) -> None:
        """Disconnect from the servers."""
        if self._servers is not None:
            await self._servers.close()
