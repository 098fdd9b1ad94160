"""An agent and its tools by one configuration."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolloutctl.agents.agent import RolloutFailed, create_agent
from rolloutctl.agents.llm import LLMFunction
from rolloutctl.agents.sequences import S, prompts_of, with_trajectories
from rolloutctl.agents.tools import create_tools
from rolloutctl.runs import DEFAULT_OUTPUT
from rolloutctl.trajectories import Trajectory

_ONLY = {
    "batch_size": (1, "the batch of generate_sequences says how many prompts there are; run_trajectory has one"),
}


@dataclass(frozen=True)
class AgenticRolloutConfig:
    """What kind of agent, with which limits and tools. Raises ValueError for a value that means nothing here."""

    agent_type: str = "react"
    max_steps: int = 10
    """Model calls."""
    max_tokens_per_step: int | None = 512
    temperature: float | None = 0.7
    tools_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tools by name, with their options."""
    batch_size: int = 1
    concurrent_requests: int = 4
    """Trajectories at once; more wait."""
    include_trajectory_in_output: bool = True
    """Whether `generate_sequences` returns the trajectories too."""
    save_trajectories: bool | None = None
    """Left out, AGENTIC_SAVE_TRAJECTORIES says; True where that is not set."""
    trajectory_save_path: str = DEFAULT_OUTPUT

    def __post_init__(self) -> None:
        """Refuse what would have no effect."""
        for name, (only, why) in _ONLY.items():
            if getattr(self, name) != only:
                raise ValueError(f"{name} is {getattr(self, name)!r}, and can be {only!r} alone: {why}")


class AgenticRollout:
    """`agent` is what the configuration says, `tools` are its tools."""

    def __init__(self, config: AgenticRolloutConfig, llm_generate_func: LLMFunction) -> None:
        """`llm_generate_func` is the one that `agent.run_trajectory` is to be given."""
        self.config, self.llm_generate_func = config, llm_generate_func
        self.tools: Mapping[str, Any] = create_tools(config.tools_config)
        self.agent = create_agent(
            config.agent_type,
            {
                "max_rounds": config.max_steps,
                "max_tokens_per_step": config.max_tokens_per_step,
                "temperature": config.temperature,
                "concurrent_requests": config.concurrent_requests,
                "output": config.trajectory_save_path,
                "save": config.save_trajectories,
            },
        )
        self.agent.set_tools(self.tools)

    async def generate_sequences(self, prompts: S) -> S:
        """A trajectory for each row of a DataProto, at most `concurrent_requests` at once (see `with_trajectories`).

        A row that infrastructure failed has an error and no reward, and costs no other row. Raises ValueError for a batch
        without prompts, and what storage raises. In a training run use docs/trainers-verl.md instead.
        """
        texts = prompts_of(prompts)
        ended = await asyncio.gather(*(self._trajectory(text, f"row-{row}") for row, text in enumerate(texts)))
        trajectories, failures = [one for one, _ in ended], [failure for _, failure in ended]
        return with_trajectories(prompts, trajectories, failures, include=self.config.include_trajectory_in_output)

    async def _trajectory(self, prompt: str, request_id: str) -> tuple[Trajectory, Exception | None]:
        try:
            return await self.agent.run_trajectory(prompt, self.llm_generate_func, request_id), None
        except RolloutFailed as failed:
            return failed.trajectory, failed
