"""Run an agent on single prompts and get trajectories, with the names of agentic-rollout-library.

Each call runs a job with one task on this machine. Tools run in a sandbox, and the rollout is recorded below `out`.
docs/coming-from-agentic-rollout-library.md has examples.
"""

from rolloutctl.agents.agent import GeneralAgent, RolloutFailed, create_agent, create_agents
from rolloutctl.agents.llm import LLMClient, create_llm_client, llm_client_from_environment
from rolloutctl.agents.own_agent import BaseAgent
from rolloutctl.agents.rollout import AgenticRollout, AgenticRolloutConfig
from rolloutctl.agents.tools import PromptBuilder, create_tool, create_tools
from rolloutctl.trajectories import StepType, Trajectory, TrajectoryStep

__all__ = [
    "AgenticRollout",
    "AgenticRolloutConfig",
    "BaseAgent",
    "GeneralAgent",
    "LLMClient",
    "PromptBuilder",
    "RolloutFailed",
    "StepType",
    "Trajectory",
    "TrajectoryStep",
    "create_agent",
    "create_agents",
    "create_llm_client",
    "create_tool",
    "create_tools",
    "llm_client_from_environment",
]
