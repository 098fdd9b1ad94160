"""Agents by the names that a manifest uses."""

import contextlib
import inspect
from collections.abc import Callable
from typing import TypeVar, cast

from agent_runtime.agents.base import Agent
from agent_runtime.extensions import ExtensionError, Registry
from rollout_api.rollout_job import PROGRAM_AGENTS

registry = Registry(
    "agent",
    "agent_rollouts.agents",
    {
        "ToolCalling": "agent_runtime.agents.tool_calling:ToolCalling",
        "ReAct": "agent_runtime.agents.react:ReAct",
        "Coding": "agent_runtime.agents.tool_calling:Coding",
        "SWE": "agent_runtime.agents.tool_calling:SWE",
        "Oracle": "agent_runtime.agents.without_model:Oracle",
        "Nop": "agent_runtime.agents.without_model:Nop",
        "Environment": "agent_runtime.agents.environment:Environment",
    },
    reserved=PROGRAM_AGENTS,
)

AgentClass = TypeVar("AgentClass", bound=type[Agent])


def agent(name: str) -> Callable[[AgentClass], AgentClass]:
    """Register a class of agents under a name in this process. Raises ExtensionError for a built-in's name."""

    def register(agent_class: AgentClass) -> AgentClass:
        registry.register(name, agent_class)
        return agent_class

    return register


def find_agent(name: str) -> Callable[[], Agent]:
    """Return the class of an agent. Each attempt has its own instance. Raises ExtensionError."""
    found = registry.find(name)
    if not isinstance(found, type):
        raise ExtensionError(f"agent {name!r} is {found!r}, not a class; see docs/agents-and-tools.md")
    if not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ExtensionError(f"agent {name!r} is {found!r}, which has no `async def run(self, context)`")
    with contextlib.suppress(ValueError):  # a class without a signature
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ExtensionError(
                f"agent {name!r} cannot be created without arguments: {error}; give them defaults, and read "
                "options of the "
                "manifest from context.spec.config"
            ) from None
    return cast(type[Agent], found)
