"""Plugins: code of a user's that is called around groups, rollouts, tool calls and verifier commands."""

from agent_runtime.models.base import ToolCall
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
    "ToolCall",
    "ToolUse",
    "TrajectoryAnalyzer",
]
