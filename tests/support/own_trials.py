"""Classes for `agent_import_path` and `environment_import_path` of verl-recipe PR #83."""

from pathlib import Path

from agent_runtime.agents.tool_calling import ToolCalling
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.sandbox import SandboxTemplate


class Agent(ToolCalling):
    """Does what the built-in agent does."""


class Sandboxes(LocalProvider):
    """Keeps its files below a folder that the user chooses."""

    def __init__(self, folder: str) -> None:
        super().__init__(Path(folder), SandboxTemplate(), places=2)


class NoSandboxes:
    """A class that is not a provider."""
