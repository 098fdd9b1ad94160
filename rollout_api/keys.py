"""Keys that a job refers to but does not contain: which fields refer to one, and where runner pods find it."""

from typing import NamedTuple

from rollout_api.model import ApiKeySource
from rollout_api.rollout_job import RolloutJob

MODEL_KEY_VARIABLE = "ROLLOUT_MODEL_API_KEY"
"""Environment variable with the model's key, in runner pods and pods of the session proxy."""


class NamedKey(NamedTuple):
    """A field that refers to a key, and the runner pods' variable that holds it if it comes from a Secret."""

    field: str
    source: ApiKeySource
    variable: str


def mcp_key_variable(server: str) -> str:
    """Return the variable of an MCP server's key. Server names have no underscore, so no two servers share one."""
    return f"ROLLOUT_MCP_API_KEY_{server.replace('-', '_')}"


def named_keys(job: RolloutJob) -> list[NamedKey]:
    """Return every key that the job refers to."""
    endpoint = job.spec.model.endpoint if job.spec.model else None
    found = [("spec.model.endpoint", endpoint.api_key_from, MODEL_KEY_VARIABLE)] if endpoint else []
    for index, server in enumerate(job.spec.agent.mcp_servers):
        found.append((f"spec.agent.mcpServers[{index}]", server.api_key_from, mcp_key_variable(server.name)))
    return [
        NamedKey(f"{field}.apiKeyFrom", source, variable) for field, source, variable in found if source is not None
    ]
