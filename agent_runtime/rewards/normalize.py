"""Rewards compared with one another: pure, and equal to what ROLL computes (`agentic_reward_norm`).

A rollout without a reward (lost to infrastructure, not gradable, cancelled) takes no part in any statistic and gets no
advantage; so a failure of a node cannot make its neighbours look better or worse.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from agent_runtime.rewards.statistics import mean, sample_std
from rollout_api.records import Outcome, Result
from rollout_api.rewards import GroupBy, NormalizationMethod, RewardNormalization

EPSILON = 1e-6
"""Added to the standard deviation, and the least that counts as one; both as in ROLL and in verl's GRPO."""
LOWEST, HIGHEST = -1.0, 3.0
"""Bounds of `AsymClip`, as in RAGEN, from which ROLL has it."""


def normalized(rewards: Sequence[float], method: NormalizationMethod, clip: float | None = None) -> list[float]:
    """The advantages of rewards that are compared with one another, in their order."""
    if method is NormalizationMethod.IDENTITY or not rewards:
        values = list(rewards)
    else:
        centre = mean(rewards) or 0.0
        values = [reward - centre for reward in rewards]
    if method in (NormalizationMethod.MEAN_STD, NormalizationMethod.ASYM_CLIP):
        std = sample_std(rewards) or 0.0
        values = [value / (std + EPSILON) if std > EPSILON else 0.0 for value in values]
    if method is NormalizationMethod.ASYM_CLIP:
        values = [min(max(value, LOWEST), HIGHEST) for value in values]
    return values if clip is None else [min(max(value, -clip), clip) for value in values]


def advantages(results: Iterable[Result], spec: RewardNormalization) -> dict[int, float]:
    """The advantage of each rollout that has a reward, by index.

    All that is compared must be there: the whole group for `Group`, the whole batch for `Batch` and `Tag`.
    """
    compared: dict[object, dict[int, float]] = defaultdict(dict)
    for result in results:
        if result.outcome is Outcome.COMPLETED and result.reward is not None:
            compared[_key(result, spec.group_by)][result.index] = result.reward
    return {
        index: value
        for rewards in compared.values()
        for index, value in zip(rewards, normalized(list(rewards.values()), spec.method, spec.clip), strict=True)
    }


def with_advantages(results: Collection[Result], spec: RewardNormalization | None) -> Iterator[Result]:
    """The results, in their order, with their advantages. Goes through them twice, and keeps none."""
    found = {} if spec is None else advantages(results, spec)
    for result in results:
        yield result if spec is None else result.model_copy(update={"advantage": found.get(result.index)})


def with_group_advantages(results: Collection[Result], spec: RewardNormalization | None) -> Iterator[Result]:
    """A finished group's results: with advantages where they need no other group."""
    return with_advantages(results, spec if spec is not None and spec.group_by is GroupBy.GROUP else None)


def _key(result: Result, group_by: GroupBy) -> object:
    if group_by is GroupBy.GROUP:
        return result.group
    # Tags are compared within a batch: what was sampled with other weights is another batch.
    tag = result.tags[0] if result.tags and group_by is GroupBy.TAG else None
    return result.batch, tag
