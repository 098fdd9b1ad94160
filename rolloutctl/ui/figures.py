"""What the results of a run add up to, by group and over all: pure. Masked rollouts count for no mean."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_runtime.statistics import mean, pass_at_k, sample_std, standard_error
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
    """Figures of each group, in the order of the groups. The results come by index, and one group is kept at a time."""
    groups = itertools.groupby(results, key=lambda result: result.group)
    return [_group(list(members), k) for _, members in groups]


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
        pass_at_1=mean([result.passed is True for result in graded]),
        pass_at_k=pass_at_k(len(graded), passed, k) if len(graded) >= k else None,
        outcomes=_outcomes(members),
    )


def overall_figures(results: Iterable[Result], groups: Sequence[GroupFigures]) -> Figures:
    """Figures of the whole run. Keeps numbers of the results, and no result."""
    masked, by_group, outcomes = 0, dict[int, list[float]](), Counter[str]()
    for result in results:
        masked += result.outcome is not Outcome.COMPLETED
        outcomes[how_it_ended(result)] += 1
        for graded in _graded([result]):
            by_group.setdefault(graded.group, []).append(graded.reward or 0.0)
    rewards = [reward for group in by_group.values() for reward in group]
    return Figures(
        graded=len(rewards),
        masked=masked,
        mean=mean(rewards),
        standard_error=standard_error(list(by_group.values())),
        pass_at_1=mean([group.pass_at_1 for group in groups if group.pass_at_1 is not None]),
        pass_at_k=mean([group.pass_at_k for group in groups if group.pass_at_k is not None]),
        outcomes=dict(outcomes.most_common()),
    )


def batch_figures(results: Iterable[Result]) -> list[BatchFigures]:
    """Figures of each label, in the order in which they were submitted first; none where nothing has a label."""
    first: dict[str, int] = {}
    rewards: dict[str, list[float]] = {}
    for result in results:
        if result.batch is not None:
            first[result.batch] = min(result.group, first.get(result.batch, result.group))
            rewards.setdefault(result.batch, []).extend(graded.reward or 0.0 for graded in _graded([result]))
    ordered = sorted(rewards, key=lambda label: first[label])
    return [BatchFigures(label, len(rewards[label]), mean(rewards[label])) for label in ordered]


def _graded(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.outcome is Outcome.COMPLETED and result.reward is not None]


def _outcomes(results: Sequence[Result]) -> dict[str, int]:
    return dict(Counter(how_it_ended(result) for result in results).most_common())
