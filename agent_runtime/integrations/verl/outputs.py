"""Convert members into verl's `AgentLoopOutput`, and into the legacy trainer's batch, with one row for each rollout."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput  # type: ignore[import-not-found]

from agent_runtime.integrations.verl.rollouts import Member
from agent_runtime.integrations.verl.samples import Group, Sample, mean_info, same_keys
from rollout_api.records import Result


def outputs_of(member: Member, version: int) -> list[Any]:
    """Return an `AgentLoopOutput` for each sample. `version` applies to tokens whose server reports none."""
    result = member.result
    return [_output(result, sample, result.reward, version, member.tool_rewards) for sample in member.samples]


def placeholder(
    result: Result,
    prompt_ids: Sequence[int],
    end_id: int,
    reward: float | None,
    version: int,
    experts: tuple[int, int] | None = None,
) -> Any:
    """Return a row without training data: a single token, with mask 0. `experts`: layers and experts in each, if other rows
    have routed experts.
    """
    output = _output(result, Sample(list(prompt_ids), [end_id], [0], [0.0], None, None), reward, version)
    if experts is not None:
        output.routed_experts = numpy.zeros((len(prompt_ids) + 1, *experts), numpy.int16)
    return output


def _output(
    result: Result, sample: Sample, reward: float | None, version: int, tool_rewards: Sequence[float] = ()
) -> Any:
    return AgentLoopOutput(
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        response_mask=sample.response_mask,
        response_logprobs=sample.logprobs,
        routed_experts=_experts(sample),
        reward_score=reward,
        # verl counts each answer, and the message before it.
        num_turns=2 * result.turns,
        metrics=_metrics(result),
        extra_fields={
            "min_global_steps": version if sample.min_version is None else sample.min_version,
            "max_global_steps": version if sample.max_version is None else sample.max_version,
            "turn_scores": [],
            "tool_rewards": list(tool_rewards),
            # Filled by verl's reward functions; batches need the same keys in all rows.
            "reward_extra_info": {},
        },
    )


def _experts(sample: Sample) -> Any:
    """Return an array [tokens, layers, experts in each] of prompt and response, in verl's type."""
    if sample.experts is None:
        return None
    tokens = len(sample.prompt_ids) + len(sample.response_ids)
    return sample.experts.to_numpy()[:tokens].astype(numpy.int16)


def _metrics(result: Result) -> Any:
    seconds = result.seconds
    return AgentLoopMetrics(
        generate_sequences=seconds.get("model", 0.0),
        tool_calls=seconds.get("tools", 0.0),
        compute_score=seconds.get("verifier", 0.0),
    )


NOT_COLUMNS = frozenset({"agent_name", "multi_modal_data", "__do_sample__"})
"""Columns that verl does not pass to reward functions and trainers either."""


async def outputs_by_row(
    worker: Any,
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Group],
    played: Sequence[Sequence[Member]],
    *,
    validate: bool,
    version: int,
) -> list[Any]:
    """Return verl's padded output of each row.

    For a rollout with several branches it is the last branch. A lost rollout gets mask 0 and the mean reward of its
    group (NaN if the whole group is lost), so that it does not change the group's mean. It lowers the standard
    deviation, which no reward of a single row avoids.
    """
    outputs: list[Any] = [None] * len(rows)
    arrays = (sample.experts for members in played for member in members for sample in member.samples)
    experts = next((array.shape[1:] for array in arrays if array is not None), None)

    async def place(row: int, output: Any, branches: int, *, lost: bool) -> None:
        output.extra_fields |= {"branches": branches, "lost": lost}
        columns = {key: value for key, value in rows[row].items() if key not in NOT_COLUMNS}
        outputs[row] = await worker._agent_loop_postprocess(output, validate, **columns)

    def nothing(row: int, member: Member, reward: float | None) -> Any:
        end_id = worker.tokenizer.eos_token_id
        return placeholder(member.result, worker.prompt_ids(rows[row]), end_id, reward, version, experts)

    lost = []
    for group, members in zip(groups, played, strict=True):
        for row, member in zip(group.rows, members, strict=True):
            if member.is_lost:
                lost.append((group, row, member))
                continue
            made = outputs_of(member, version)
            await place(row, made[-1] if made else nothing(row, member, member.result.reward), len(made), lost=False)
    kept = [output for output in outputs if output is not None]
    for group, row, member in lost:
        own = [outputs[number] for number in group.rows if number not in {number for _, number, _ in lost}]
        scores = [output.reward_score for output in own]
        graded = all(output.reward_score is not None for output in kept)
        output = nothing(row, member, (fmean(scores) if scores else math.nan) if graded else None)
        output.extra_fields["reward_extra_info"] = mean_info(
            [known.extra_fields["reward_extra_info"] for known in own or kept]
        )
        await place(row, output, 0, lost=True)
    for output, info in zip(outputs, same_keys([o.extra_fields["reward_extra_info"] for o in outputs]), strict=True):
        output.extra_fields["reward_extra_info"] = info
    return outputs
