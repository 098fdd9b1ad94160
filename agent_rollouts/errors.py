"""Exceptions that reach your code."""

from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ModelError
from agent_runtime.recording.reader import NoSuchRun, NoTokenIds
from agent_runtime.recording.store import StorageError
from agent_runtime.sandboxes.base import FileError, SandboxFailure, WorkspaceLimit
from agent_runtime.tools.base import ToolError
from rollout_api.manifest import ManifestError
from rolloutctl.agents.agent import RolloutFailed
from rolloutctl.client import RunAborted
from rolloutctl.policy import PolicyNotServed

__all__ = [
    "AgentBroken",
    "ExtensionError",
    "FileError",
    "ManifestError",
    "ModelError",
    "NoSuchRun",
    "NoTokenIds",
    "PolicyNotServed",
    "RolloutFailed",
    "RunAborted",
    "SandboxFailure",
    "StorageError",
    "ToolError",
    "WorkspaceLimit",
]
