"""The public Python interface of agent-rollouts: the names in `__all__` of its modules. Everything else may change.

from agent_rollouts import Client

async for group in Client().run("job.yaml"):
    train_on(group.results)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout_api.version import VERSION as __version__

if TYPE_CHECKING:
    from agent_rollouts.agents import AgentContext, BaseAgent, agent
    from agent_rollouts.client import Client, GroupFinished
    from agent_rollouts.models import FunctionModel, ToolCall
    from agent_rollouts.session import (
        FinishedGroup,
        JobStream,
        RolloutSession,
        ServedPolicy,
        WeightPush,
        WeightPushHook,
    )
    from agent_rollouts.tasks import RolloutJob, Task, load_manifest
    from agent_rollouts.tools import ToolContext, ToolResult, tool

__all__ = [
    "AgentContext",
    "BaseAgent",
    "Client",
    "FinishedGroup",
    "FunctionModel",
    "GroupFinished",
    "JobStream",
    "RolloutJob",
    "RolloutSession",
    "ServedPolicy",
    "Task",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "WeightPush",
    "WeightPushHook",
    "__version__",
    "agent",
    "load_manifest",
    "tool",
]

_MODULES = [f"agent_rollouts.{name}" for name in ("tasks", "tools", "models", "agents", "client", "session")]


def __getattr__(name: str) -> Any:
    # Modules are imported on first use, because a module that only defines a tool does not need the engine.
    if name in __all__:
        for module in map(import_module, _MODULES):
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'agent_rollouts' has no attribute {name!r}")
