"""What a user of verl-recipe PR #83 names by `agent_import_path` and `environment_import_path`."""

from pathlib import Path

from agent_runtime.agents.tool_calling import ToolCalling
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.sandbox import SandboxTemplate


class Agent(ToolCalling):
    """Does what the built-in agent does."""


class Sandboxes(LocalProvider):
    """Keeps what it needs below a folder of the user's choice."""

    def __init__(self, folder: str) -> None:
        super().__init__(Path(folder), SandboxTemplate(), places=2)


class NoSandboxes:
    """Is no provider."""
