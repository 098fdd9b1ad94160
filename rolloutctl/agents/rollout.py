"""An agent with tools from one configuration, for one prompt or for a batch in verl's format (`DataProto`).

verl is not required. Any class with `batch`, `non_tensor_batch` and `meta_info` is accepted, and the result has the same
class. New columns are numpy arrays of objects if the given columns are arrays, else lists.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rolloutctl.agents.agent import RolloutFailed, create_agent
from rolloutctl.agents.llm import LLMFunction
from rolloutctl.agents.tools import create_tools
from rolloutctl.completion import DEFAULT_OUTPUT
from rolloutctl.trajectories import Trajectory

S = TypeVar("S")
"""A class like `DataProto`. Its `non_tensor_batch` maps names to columns with one entry for each row."""


def prompts_of(sequences: Any) -> list[str]:
    """Return the prompt of each row as text, from the column `messages` or `raw_prompt`.

    An entry is text, or a list of system and user messages. Raises ValueError that names an invalid row.
    """
    columns = sequences.non_tensor_batch
    name = next((name for name in ("messages", "raw_prompt") if name in columns), None)
    if name is None:
        raise ValueError(
            f"the batch has the columns {', '.join(columns) or 'none'}; expected messages or raw_prompt (verl: "
            "data.return_raw_chat=True)"
        )
    return [_text(value, f"{name}[{row}]") for row, value in enumerate(columns[name])]


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = []
    for message in value:
        if message["role"] not in ("system", "user") or not isinstance(message["content"], str):
            raise ValueError(
                f"{where} has a message of {message['role']}; expected only text messages of system and user"
            )
        parts.append(message["content"])
    return "\n\n".join(parts)


def with_trajectories(
    sequences: S, trajectories: Sequence[Trajectory], failures: Sequence[Exception | None], *, include: bool
) -> S:
    """Return the batch with additional columns.

    `responses`: text. `response_ids`, `response_mask`: token ids, and 1 for each sampled token; None if the model returned
    no ids. `final_rewards`: None if not graded. `errors`: why the row was lost to infrastructure, or None.
    `trajectories`: the whole trajectories, if `include` is True.
    """
    columns: dict[str, list[Any]] = {
        "responses": [trajectory.get_final_response() for trajectory in trajectories],
        "response_ids": [],
        "response_mask": [],
        "final_rewards": [trajectory.get_total_reward() for trajectory in trajectories],
        "errors": [None if failure is None else str(failure) for failure in failures],
    }
    for trajectory in trajectories:
        ids, mask = _response(trajectory)
        columns["response_ids"].append(ids)
        columns["response_mask"].append(mask)
    if include:
        columns["trajectories"] = [trajectory.to_dict() for trajectory in trajectories]
    make: Callable[..., S] = type(sequences)
    given: Any = sequences
    return make(
        batch=given.batch,
        non_tensor_batch={**given.non_tensor_batch, **_as_columns(given, columns)},
        meta_info=given.meta_info,
    )


def _response(trajectory: Trajectory) -> tuple[list[int] | None, list[int] | None]:
    """Return the ids and mask of the response; None for both if there is not exactly one token sequence with samples."""
    if len(trajectory.tokens) != 1 or 1 not in (branch := trajectory.tokens[0]).mask:
        return None, None
    start = branch.mask.index(1)
    return branch.token_ids[start:], branch.mask[start:]


def _as_columns(sequences: Any, columns: Mapping[str, list[Any]]) -> dict[str, Any]:
    if any(isinstance(column, list) for column in sequences.non_tensor_batch.values()):
        return dict(columns)
    import numpy as np  # only DataProto needs it

    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return arrays


@dataclass(frozen=True)
class AgenticRolloutConfig:
    """Type, limits and tools of an agent. Raises ValueError for invalid values."""

    agent_type: str = "react"
    max_steps: int = 10
    """Most model calls."""
    max_tokens_per_step: int | None = 512
    temperature: float | None = 0.7
    tools_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batch_size: int = 1
    concurrent_requests: int = 4
    """Most concurrent trajectories; others wait."""
    include_trajectory_in_output: bool = True
    """Whether `generate_sequences` returns the trajectories too."""
    save_trajectories: bool | None = None
    """Default: AGENTIC_SAVE_TRAJECTORIES, or True if it is not set."""
    trajectory_save_path: str = DEFAULT_OUTPUT

    def __post_init__(self) -> None:
        if self.batch_size != 1:
            raise ValueError(
                f"batch_size is {self.batch_size!r}, expected 1: generate_sequences takes the number of prompts from its "
                "batch, and run_trajectory has one prompt"
            )


class AgenticRollout:
    """An agent with its tools, created from a configuration (attributes `agent` and `tools`)."""

    def __init__(self, config: AgenticRolloutConfig, llm_generate_func: LLMFunction) -> None:
        """Create agent and tools. `llm_generate_func` is the model, as for `GeneralAgent.run_trajectory`."""
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
        """Run each row of a DataProto, at most `concurrent_requests` concurrently. `with_trajectories` lists the columns of
        the result.

        A row that is lost to infrastructure has an error and no reward; other rows are not affected. Raises ValueError for
        a batch without prompts, and errors of storage. For training runs, use docs/trainers-verl.md instead.
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
