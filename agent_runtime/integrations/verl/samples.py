"""verl's training data: samples of a rollout's token sequences, and the groups of a batch's rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.expert_arrays import ExpertArray


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. `response_mask` is 1 exactly for the tokens that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    """Of the response; 0 if the mask is 0."""
    min_version: int | None
    """Oldest policy that sampled one of its tokens; None if no token has a version."""
    max_version: int | None
    experts: ExpertArray | None = None
    """Of the prompt and the response, and maybe of tokens after them; None if they are not recorded."""


def samples_of(
    branches: Sequence[tuple[Branch, ExpertArray | None]], prompt_length: int, response_length: int
) -> list[Sample]:
    """Return the branches with training data, in order, each with its routed experts.

    The prompt is everything before the first sampled token, up to `prompt_length`. The rest of a longer prompt is at
    the beginning of the response, with mask 0. A response ends at `response_length`, as in verl's own agent loops. If
    experts are recorded, it also ends after the first token without them, because verl would replay expert 0.
    """
    samples = []
    for branch, experts in branches:
        if branch.logprobs is None or 1 not in branch.mask:
            continue
        start = min(branch.mask.index(1), prompt_length)
        end = start + response_length
        if experts is not None:
            end = min(end, 1 + next((last for first, last in experts.reported if first == 0), 0))
        mask = branch.mask[start:end]
        if 1 not in mask:
            continue
        versions = [int(version) for version in branch.policy_versions[start:end] if version and version.isdecimal()]
        samples.append(
            Sample(
                prompt_ids=branch.token_ids[:start],
                response_ids=branch.token_ids[start:end],
                response_mask=mask,
                logprobs=branch.logprobs[start:end],
                min_version=min(versions, default=None),
                max_version=max(versions, default=None),
                experts=experts,
            )
        )
    return samples


@dataclass(frozen=True)
class Group:
    """Rows that are rollouts of one prompt."""

    rows: tuple[int, ...]
    greedy: bool


def groups_of(rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return the groups of a batch, ordered by their first rows. REMAX's greedy baselines are separate groups."""
    found: dict[tuple[str, bool], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault((str(row["uid"]), not bool(row.get("__do_sample__", True))), []).append(number)
    return [Group(tuple(numbers), greedy) for (_, greedy), numbers in found.items()]


def shares_of(groups: Sequence[Group], workers: int) -> list[list[int]]:
    """Return the rows of each worker, with whole groups distributed in turn; workers without rows are left out."""
    shares = [[row for group in groups[worker::workers] for row in group.rows] for worker in range(workers)]
    return [share for share in shares if share]


def mean_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of a reward function's further values; for values that are not numbers, the first one."""
    return {
        key: fmean(float(info[key]) for info in infos) if isinstance(value, int | float) else value
        for key, value in (infos[0] if infos else {}).items()
    }


def same_keys(infos: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mappings with all keys in the same order, as verl's batches need it; NaN for missing values."""
    keys = sorted({key for info in infos for key in info})
    return [{key: info.get(key, math.nan) for key in keys} for info in infos]
