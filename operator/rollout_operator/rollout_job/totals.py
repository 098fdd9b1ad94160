"""What all runners together have done, from what each reports of its shard."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.rollout_job import RunnerReport

REWARD_DIGITS = 6
"""More would be noise of the order in which rewards were added."""


@dataclass(frozen=True)
class Totals:
    """Sums over the shards."""

    total: int | None
    """Rollouts in all; None as long as it is unknown."""
    sealed: int
    running: int
    outcomes: dict[str, int]
    mean_reward: float | None
    token_forks: int

    def __str__(self) -> str:
        of = f" of {self.total}" if self.total is not None else ""
        working = f", {self.running} at work" if self.running else ""
        return f"{self.sealed}{of} rollouts sealed{working}"


def add_up(reports: Sequence[RunnerReport], replicas: int, listed: int | None) -> Totals:
    """The sums of reports of distinct runners. `listed`: rollouts, when the manifest has all tasks."""
    outcomes: dict[str, int] = {}
    for report in reports:
        for outcome, count in report.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    sealed = sum(report.sealed for report in reports)
    reported = [report.total for report in reports if report.total is not None]
    total = sum(reported) if len(reported) == replicas else listed
    if total is not None:
        # Reports are of different moments, and a total never reads lower than what is there.
        total = max(total, sealed, sum(outcomes.values()))
    rewarded = sum(report.rewarded for report in reports)
    mean = sum(report.reward_sum / rewarded for report in reports if report.rewarded) if rewarded else None
    return Totals(
        total=total,
        sealed=sealed,
        running=sum(report.running for report in reports),
        outcomes=dict(sorted(outcomes.items())),
        mean_reward=None if mean is None else round(mean, REWARD_DIGITS),
        token_forks=sum(report.token_forks for report in reports),
    )
