"""From members to verl's `AgentLoopOutput`."""

from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import (  # type: ignore[import-not-found]
    AgentLoopMetrics,
    AgentLoopOutput,
)

from agent_runtime.integrations.verl.rollouts import Member
from agent_runtime.integrations.verl.samples import Sample
from rollout_api.records import Result


def outputs_of(member: Member, version: int) -> list[Any]:
    """An `AgentLoopOutput` for each sample. `version` is that of tokens whose server says none."""
    result = member.result
    return [_output(result, sample, result.reward, version, member.tool_rewards) for sample in member.samples]


def placeholder(result: Result, prompt_ids: Sequence[int], end_id: int, reward: float | None, version: int) -> Any:
    """A row that nothing is learned from: a single token, with mask 0."""
    return _output(result, Sample(list(prompt_ids), [end_id], [0], [0.0], None, None), reward, version)


def _output(
    result: Result, sample: Sample, reward: float | None, version: int, tool_rewards: Sequence[float] = ()
) -> Any:
    return AgentLoopOutput(
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        response_mask=sample.response_mask,
        response_logprobs=sample.logprobs,
        reward_score=reward,
        # As verl counts them: each answer, and what it answers to.
        num_turns=2 * result.turns,
        metrics=_metrics(result),
        extra_fields={
            "min_global_steps": version if sample.min_version is None else sample.min_version,
            "max_global_steps": version if sample.max_version is None else sample.max_version,
            "turn_scores": [],
            "tool_rewards": list(tool_rewards),
            # verl's reward functions put theirs here; its batches need the same keys in all rows.
            "reward_extra_info": {},
        },
    )


def _metrics(result: Result) -> Any:
    seconds = result.seconds
    return AgentLoopMetrics(
        generate_sequences=seconds.get("model", 0.0),
        tool_calls=seconds.get("tools", 0.0),
        compute_score=seconds.get("verifier", 0.0),
    )
