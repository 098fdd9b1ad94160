"""Environments that agents act in, and single episodes in them."""

from agent_runtime.integrations.roll_episodes import AgentRunner, EpisodeResult
from rollout_api.environments import TaskEnvironment

__all__ = ["AgentRunner", "EpisodeResult", "TaskEnvironment"]
