"""What the results of a run add up to, by group and over all: pure. Masked rollouts count for no mean."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_runtime.rewards.statistics import mean, pass_at_k, sample_std, standard_error
from rollout_api.records import Outcome, Result


@dataclass(frozen=True)
class GroupFigures:
    """One task's rollouts. Means are None without a graded rollout, `pass_at_k` with fewer than k of them too."""

    group: int
    task: str
    tags: tuple[str, ...]
    members: tuple[int, ...]
    """Indices of its ended rollouts."""
    graded: int
    mean: float | None
    std: float | None
    pass_at_1: float | None
    pass_at_k: float | None
    outcomes: dict[str, int]
    """How many ended how: the stop reason of a Completed one, the outcome of another."""


@dataclass(frozen=True)
class Figures:
    """All rollouts. pass@k is the mean over the groups that have one; the standard error is that of `mean`, by group."""

    graded: int
    masked: int
    mean: float | None
    standard_error: float | None
    pass_at_1: float | None
    pass_at_k: float | None
    outcomes: dict[str, int]


@dataclass(frozen=True)
class BatchFigures:
    """The rollouts that were submitted with one label: a point of a learning curve."""

    label: str
    graded: int
    mean: float | None
    """None without a graded rollout."""


def how_it_ended(result: Result) -> str:
    """The stop reason of a Completed rollout, the outcome of a masked one."""
    if result.outcome is Outcome.COMPLETED and result.stop_reason is not None:
        return result.stop_reason.value
    return result.outcome.value


def group_figures(results: Iterable[Result], k: int) -> list[GroupFigures]:
    """Figures of each group, in the order of the groups."""
    groups: dict[int, list[Result]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    return [_group(sorted(groups[number], key=lambda result: result.index), k) for number in sorted(groups)]


def _group(members: Sequence[Result], k: int) -> GroupFigures:
    graded = _graded(members)
    rewards = [result.reward or 0.0 for result in graded]
    passed = sum(result.passed is True for result in graded)
    return GroupFigures(
        group=members[0].group,
        task=members[0].task,
        tags=tuple(members[0].tags),
        members=tuple(result.index for result in members),
        graded=len(graded),
        mean=mean(rewards),
        std=sample_std(rewards),
        pass_at_1=passed / len(graded) if graded else None,
        pass_at_k=pass_at_k(len(graded), passed, k) if len(graded) >= k else None,
        outcomes=_outcomes(members),
    )


def overall_figures(results: Sequence[Result], groups: Sequence[GroupFigures]) -> Figures:
    """Figures of the whole run."""
    graded = _graded(results)
    by_group: dict[int, list[float]] = {}
    for result in graded:
        by_group.setdefault(result.group, []).append(result.reward or 0.0)
    return Figures(
        graded=len(graded),
        masked=sum(result.outcome is not Outcome.COMPLETED for result in results),
        mean=mean([result.reward or 0.0 for result in graded]),
        standard_error=standard_error(list(by_group.values())),
        pass_at_1=mean([group.pass_at_1 for group in groups if group.pass_at_1 is not None]),
        pass_at_k=mean([group.pass_at_k for group in groups if group.pass_at_k is not None]),
        outcomes=_outcomes(results),
    )


def batch_figures(results: Iterable[Result]) -> list[BatchFigures]:
    """Figures of each label, in the order in which they were submitted first; none where nothing has a label."""
    batches: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.group):
        if result.batch is not None:
            batches.setdefault(result.batch, []).append(result)
    rewards = {label: [result.reward or 0.0 for result in _graded(members)] for label, members in batches.items()}
    return [BatchFigures(label, len(found), mean(found)) for label, found in rewards.items()]


def _graded(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.outcome is Outcome.COMPLETED and result.reward is not None]


def _outcomes(results: Sequence[Result]) -> dict[str, int]:
    return dict(Counter(how_it_ended(result) for result in results).most_common())
