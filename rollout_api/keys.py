"""The keys that a job names and does not hold: which fields name one, and where runner pods find it."""

from typing import NamedTuple

from rollout_api.model import ApiKeySource
from rollout_api.rollout_job import RolloutJob

MODEL_KEY_VARIABLE = "ROLLOUT_MODEL_API_KEY"
"""Runner pods, and those of the session proxy, have the model's key in this variable."""


class NamedKey(NamedTuple):
    """A field that names a key, and the variable of runner pods that holds it when it comes from a Secret."""

    field: str
    source: ApiKeySource
    variable: str


def mcp_key_variable(server: str) -> str:
    """The variable for the MCP server of that name; names have no underscore, so no two servers share one."""
    return f"ROLLOUT_MCP_API_KEY_{server.replace('-', '_')}"


def named_keys(job: RolloutJob) -> list[NamedKey]:
    """Every key that the job names."""
    endpoint = job.spec.model.endpoint if job.spec.model else None
    found = [("spec.model.endpoint", endpoint.api_key_from, MODEL_KEY_VARIABLE)] if endpoint else []
    for index, server in enumerate(job.spec.agent.mcp_servers):
        found.append((f"spec.agent.mcpServers[{index}]", server.api_key_from, mcp_key_variable(server.name)))
    return [
        NamedKey(f"{field}.apiKeyFrom", source, variable) for field, source, variable in found if source is not None
    ]
