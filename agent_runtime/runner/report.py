"""A runner's report on its shard, from the engine's events. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from agent_runtime.engine.events import AttemptFailed, Event, JobEnded, JobStarted, RolloutSealed, RolloutStarted
from agent_runtime.engine.scheduling.shard import Shard
from rollout_api.records import Outcome, Result
from rollout_api.rollout_job import RunnerReport, RunnerState

INTERVALS_CHARACTERS = 4096
"""Limit of `sealedIndexes`, because etcd stores each report for minutes."""
MESSAGE_CHARACTERS = 4096
FASTEST_SECONDS = 1.0
REPORTS_A_SECOND = 10
"""Reports per second of all runners of a job together. More would only load the API server: the operator adds them up
every 10 s.
"""


def report_interval(runners: int) -> float:
    """Return the seconds between two reports of one runner."""
    return max(FASTEST_SECONDS, runners / REPORTS_A_SECOND)


def intervals(positions: Iterable[int]) -> str | None:
    """Format numbers as `0-14,17`; None if that exceeds a report's limit."""
    parts: list[list[int]] = []
    for position in sorted(set(positions)):
        if parts and position == parts[-1][1] + 1:
            parts[-1][1] = position
        else:
            parts.append([position, position])
        if len(parts) > INTERVALS_CHARACTERS:
            return None
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return text if len(text) <= INTERVALS_CHARACTERS else None


def previous_report(shard: Mapping[str, Any]) -> RunnerReport | None:
    """Return this runner's last report, from its RolloutShard in the API server."""
    status = shard.get("status")
    return RunnerReport.model_validate(status) if status else None


class ShardTally:
    """Counts of one shard. A rollout counts once, even if several events report it."""

    def __init__(self, shard: Shard, group_size: int) -> None:
        self.shard, self.group_size = shard, group_size
        self.total: int | None = None
        self.started = False
        """Whether it includes the rollouts that earlier processes sealed; before that its counts are incomplete."""
        self.running: set[int] = set()
        """Indexes of the rollouts with a running attempt."""
        self.outcomes: Counter[str] = Counter()
        self._last_lost = ""
        self._loss = ""
        """Why the latest attempt was lost to infrastructure; empty if a rollout has completed since."""
        self._sealed: set[int] = set()
        self._rewards: list[float] = []
        self._token_forks = 0
        self._begun: set[int] = set()

    def observe(self, event: Event) -> None:
        match event:
            case JobStarted():
                self.started, self.total = True, event.total
                for result in event.results:
                    self._count(result)
            case RolloutStarted():
                self.running.add(event.index)
                self._begun.add(event.index // self.group_size)
            case AttemptFailed():
                self.running.discard(event.index)
                self._loss = f"{event.reason}: {event.message}"
            case RolloutSealed():
                self.running.discard(event.result.index)
                self._count(event.result)
            case JobEnded():
                self.running.clear()
                if event.summary.completed:
                    self.total = event.summary.total

    def report(self, state: RunnerState, message: str = "") -> RunnerReport:
        """Return this runner's report for its RolloutShard."""
        return RunnerReport(
            index=self.shard.index,
            state=state,
            message=message[:MESSAGE_CHARACTERS],
            total=self.total,
            sealed=len(self._sealed),
            running=len(self.running),
            sealed_indexes=intervals(map(self.position, self._sealed)) if self._sealed else None,
            outcomes=dict(sorted(self.outcomes.items())),
            reward_sum=math.fsum(self._rewards),
            rewarded=len(self._rewards),
            token_forks=self._token_forks,
        )

    @property
    def trouble(self) -> str:
        """Return a message about rollouts and attempts that were lost to infrastructure; empty if there are none."""
        lost = self.outcomes[Outcome.INFRA_FAILED.value]
        if lost:
            return f"{lost} rollout{'s' * (lost > 1)} lost to infrastructure, the last one: {self._last_lost}"
        return f"an attempt was lost to infrastructure: {self._loss}" if self._loss else ""

    @property
    def groups_waiting(self) -> int:
        """Return the number of groups that have not begun; 0 while a stream is open, whose end is unknown."""
        return 0 if self.total is None else self.total // self.group_size - len(self._begun)

    def position(self, index: int) -> int:
        """Return a rollout's number within its shard: the groups of one shard are those whose number has the same
        remainder.
        """
        group, member = divmod(index, self.group_size)
        return group // self.shard.count * self.group_size + member

    def _count(self, result: Result) -> None:
        if result.index in self._sealed:
            return
        self._sealed.add(result.index)
        self._begun.add(result.group)
        self.outcomes[result.outcome.value] += 1
        self._token_forks += result.token_forks
        if result.outcome is Outcome.INFRA_FAILED:
            self._last_lost = f"{result.reason}: {result.message}"
        elif result.outcome is Outcome.COMPLETED:
            self._loss = ""
        if result.reward is not None:
            self._rewards.append(result.reward)
