"""Write a plugin: an object with methods named like hooks, called around groups, rollouts and tool calls."""

from agent_runtime.plugins.base import (
    ActionFilter,
    EnvironmentModifier,
    EpisodeEvaluator,
    FinishedRollout,
    GroupInfo,
    Refuse,
    RolloutInfo,
    RolloutManager,
    ToolUse,
    TrajectoryAnalyzer,
)

__all__ = [
    "ActionFilter",
    "EnvironmentModifier",
    "EpisodeEvaluator",
    "FinishedRollout",
    "GroupInfo",
    "Refuse",
    "RolloutInfo",
    "RolloutManager",
    "ToolUse",
    "TrajectoryAnalyzer",
]
