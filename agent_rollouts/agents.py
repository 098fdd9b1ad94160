"""Write an agent: subclass `BaseAgent` or a built-in agent, or write a class with `run`, and register it with `agent`."""

from agent_runtime.agents.base import Agent, AgentContext, AgentReport, Stop, SubTask
from agent_runtime.agents.base_class import BaseAgent, ParsedAnswer, Trajectory
from agent_runtime.agents.react import ReAct
from agent_runtime.agents.registry import agent, find_agent, registry
from agent_runtime.agents.tool_calling import ToolCalling
from rollout_api.records import StopReason

__all__ = [
    "Agent",
    "AgentContext",
    "AgentReport",
    "BaseAgent",
    "ParsedAnswer",
    "ReAct",
    "Stop",
    "StopReason",
    "SubTask",
    "ToolCalling",
    "Trajectory",
    "agent",
    "find_agent",
    "registry",
]
