"""The classes and functions of agentic-rollout-library, under their own names: each call runs a job with one task."""

from rolloutctl.agents import (
    AgenticRollout,
    AgenticRolloutConfig,
    BaseAgent,
    GeneralAgent,
    LLMClient,
    PromptBuilder,
    RolloutFailed,
    create_agent,
    create_agents,
    create_llm_client,
    create_tool,
    create_tools,
    llm_client_from_environment,
)
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
