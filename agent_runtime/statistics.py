"""Statistics for users, scalars of a training curve, and advantages. Pure. Undefined values are None.

Rollouts without a reward (lost to infrastructure, not gradable, cancelled) are excluded from all statistics and get no
advantage. So a failed node does not change the advantages of other rollouts. Advantages equal those of ROLL
(`agentic_reward_norm`).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollout_api.records import Outcome, Result
from rollout_api.rewards import GroupBy, NormalizationMethod, RewardNormalization


def mean(values: Sequence[float]) -> float | None:
    """Return the arithmetic mean; None without values."""
    return statistics.fmean(values) if values else None


def sample_std(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample (n - 1), like torch's `std`; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def standard_error(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the mean over all values, considering that values of a group are not independent.

    Clustered by group as in Miller 2024 (arXiv 2411.00640), with the correction G/(G - 1) for few groups. If each group
    has one value, that is the sample standard deviation over √n. None for fewer than two groups with values.
    """
    filled = [group for group in groups if group]
    if len(filled) < 2:
        return None
    values = [value for group in filled for value in group]
    centre = statistics.fmean(values)
    sums = (math.fsum(value - centre for value in group) for group in filled)
    return math.sqrt(math.fsum(total**2 for total in sums) * len(filled) / (len(filled) - 1)) / len(values)


@dataclass(frozen=True)
class Difference:
    """Difference of two runs' mean rewards over their common tasks."""

    before: float
    after: float
    standard_error: float | None
    """None with fewer than two tasks."""

    @property
    def mean(self) -> float:
        """Return the mean difference."""
        return self.after - self.before

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the normal 95 % confidence interval; None without a standard error."""
        if self.standard_error is None:
            return None
        return self.mean - 1.96 * self.standard_error, self.mean + 1.96 * self.standard_error


def paired_difference(tasks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Difference | None:
    """Return the difference between two runs from each task's rewards in both, each task with equal weight; None
    without tasks.

    Paired by task as in Miller 2024 (arXiv 2411.00640, section 4.2): the difficulty of the tasks, which is common to
    both runs, is not in the error.
    """
    if not tasks:
        return None
    means = [(statistics.fmean(before), statistics.fmean(after)) for before, after in tasks]
    changes = [after - before for before, after in means]
    deviation = sample_std(changes)
    return Difference(
        before=statistics.fmean(before for before, _ in means),
        after=statistics.fmean(after for _, after in means),
        standard_error=None if deviation is None else deviation / math.sqrt(len(changes)),
    )


def pass_at_k(graded: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k rollouts, drawn without replacement from the graded ones, passed.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374). Needs 1 ≤ k ≤ graded.
    """
    return 1.0 - math.comb(graded - passed, k) / math.comb(graded, k)


def scalars(results: Sequence[Result]) -> dict[str, float]:
    """Return means over these rollouts, and the same by first tag as `env/TAG/...`; seconds are wall time."""
    found = {"rollouts": float(len(results))}
    if results:
        found["masked"] = sum(result.outcome is not Outcome.COMPLETED for result in results) / len(results)
        found |= _means("rollout", results)
    by_tag: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.tags:
            by_tag[result.tags[0]].append(result)
    for tag, members in sorted(by_tag.items()):
        found |= _means(f"env/{tag}", members)
    return found


def _means(prefix: str, results: Sequence[Result]) -> dict[str, float]:
    completed = [result for result in results if result.outcome is Outcome.COMPLETED]
    values: Mapping[str, Sequence[float]] = {
        "reward": [result.reward for result in completed if result.reward is not None],
        "passed": [float(result.passed) for result in completed if result.passed is not None],
        "turns": [result.turns for result in completed],
        "completion_tokens": [result.usage.completion_tokens for result in completed],
        "seconds": [result.seconds["total"] for result in completed if "total" in result.seconds],
    }
    named: dict[str, list[float]] = defaultdict(list)
    for result in completed:
        for name, value in result.rewards.items():
            named[name].append(value)
    means = {
        f"{prefix}/{name}": found
        for name, listed in (*named.items(), *values.items())
        if (found := mean(listed)) is not None
    }
    if (std := sample_std(values["reward"])) is not None:
        means[f"{prefix}/reward_std"] = std
    return means


EPSILON = 1e-6
"""Added to the standard deviation, and its minimum; both as in ROLL and in verl's GRPO."""
LOWEST, HIGHEST = -1.0, 3.0
"""Bounds of `AsymClip`, as in RAGEN and ROLL."""


def normalized(rewards: Sequence[float], method: NormalizationMethod, clip: float | None = None) -> list[float]:
    """Return the advantages of rewards that are compared with one another, in their order."""
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


def with_rewards(results: Iterable[Result]) -> Iterator[tuple[Result, float]]:
    """Yield the Completed results that have a reward, each with its reward."""
    for result in results:
        if result.outcome is Outcome.COMPLETED and result.reward is not None:
            yield result, result.reward


def advantages(results: Iterable[Result], spec: RewardNormalization) -> dict[int, float]:
    """Return the advantage of each rollout with a reward, by index.

    All compared rollouts must be included: the whole group for `Group`, the whole batch for `Batch` and `Tag`.
    """
    compared: dict[object, dict[int, float]] = defaultdict(dict)
    for result, reward in with_rewards(results):
        compared[_key(result, spec.group_by)][result.index] = reward
    return {
        index: value
        for rewards in compared.values()
        for index, value in zip(rewards, normalized(list(rewards.values()), spec.method, spec.clip), strict=True)
    }


def with_advantages(results: Collection[Result], spec: RewardNormalization | None) -> Iterator[Result]:
    """Yield the results in order, with their advantages. Iterates over them twice, so that not all need to be in
    memory.
    """
    found = {} if spec is None else advantages(results, spec)
    for result in results:
        yield result if spec is None else result.model_copy(update={"advantage": found.get(result.index)})


def with_group_advantages(results: Collection[Result], spec: RewardNormalization | None) -> Iterator[Result]:
    """Return a finished group's results, with advantages if these need no other group."""
    return with_advantages(results, spec if spec is not None and spec.group_by is GroupBy.GROUP else None)


def _key(result: Result, group_by: GroupBy) -> object:
    if group_by is GroupBy.GROUP:
        return result.group
    # Tags are compared within a batch: rollouts that were sampled with other weights belong to another batch.
    tag = result.tags[0] if result.tags and group_by is GroupBy.TAG else None
    return result.batch, tag
