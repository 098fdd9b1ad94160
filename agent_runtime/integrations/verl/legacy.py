"""The legacy trainer's form of a batch: a row for each rollout, in which every rollout has exactly one row."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agent_runtime.integrations.verl.groups import Group, mean_info, same_keys
from agent_runtime.integrations.verl.outputs import outputs_of, placeholder
from agent_runtime.integrations.verl.rollouts import Member

NOT_COLUMNS = frozenset({"agent_name", "multi_modal_data", "__do_sample__"})
"""Columns that verl leaves out of what it hands to reward functions and trainers too."""


async def outputs_by_row(
    worker: Any,
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Group],
    played: Sequence[Sequence[Member]],
    *,
    validate: bool,
    version: int,
) -> list[Any]:
    """verl's padded output of each row.

    A rollout with several branches gives its last one. A lost one gets mask 0 and the mean reward of its group, NaN where
    the whole group is lost, so that it moves no other's advantage.
    """
    outputs: list[Any] = [None] * len(rows)

    async def place(row: int, output: Any, branches: int, *, lost: bool) -> None:
        output.extra_fields |= {"branches": branches, "lost": lost}
        columns = {key: value for key, value in rows[row].items() if key not in NOT_COLUMNS}
        outputs[row] = await worker._agent_loop_postprocess(output, validate, **columns)

    def nothing(row: int, member: Member, reward: float | None) -> Any:
        return placeholder(member.result, worker.prompt_ids(rows[row]), worker.tokenizer.eos_token_id, reward, version)

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
