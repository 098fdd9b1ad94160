"""A runner's report on its shard, from the engine's events; and the reporter that sends it to the API server:
rate-limited, only after changes, repeated until it is accepted.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agent_runtime.engine.events import AttemptFailed, Event, JobEnded, JobStarted, RolloutSealed, RolloutStarted
from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.kube.api import ApiError
from agent_runtime.runner.job_state import JobApi, JobState, fetch_job_state
from agent_runtime.runner.log import log
from rollout_api.cluster import shard_name
from rollout_api.conditions import Metadata
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
        """Whether the tally includes rollouts sealed by earlier processes; until then its counts are incomplete."""
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


PAUSE_SECONDS = 2.0
"""Pause between two attempts to send the last report."""
REFUSAL_PATIENCE_SECONDS = 60.0
"""Time for which refused reports are retried: a starting API server may refuse requests that it accepts later."""


class JobDeleted(Exception):
    """The RolloutJob no longer exists."""


class ReportRefused(Exception):
    """The API server refuses the report; the message is the API server's."""


class Reporter:
    """Reports of one runner; `make` returns the current report."""

    def __init__(
        self, api: JobApi, job: Metadata, *, index: int, interval_seconds: float, make: Callable[[], RunnerReport]
    ) -> None:
        self._api, self._job, self._make = api, job, make
        self._shard = shard_name(job.name, job.uid or "", index)
        self._interval = interval_seconds
        self._finishing = asyncio.Event()
        self._urgent = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._delivered: RunnerReport | None = None
        """The last report that the API server has; None if unknown."""
        self._away = False

    def start(self) -> None:
        """Start reporting. Failures of the API server do not affect rollouts."""
        self._work = asyncio.create_task(self._report())

    def report_now(self) -> None:
        """Send the next report now, and retry every second until it is accepted, because another process waits for it."""
        self._urgent.set()

    async def finish(self, *, within_seconds: float | None = None) -> None:
        """Send the last report, retrying while the API server is unavailable; without a limit, forever.

        Raises JobDeleted, ReportRefused, and TimeoutError at the limit.
        """
        self._finishing.set()
        async with asyncio.timeout(within_seconds):
            if self._work is not None:
                # Two concurrent reports could arrive in the wrong order.
                await self._work
            await self._deliver_last()

    async def _report(self) -> None:
        while not self._finishing.is_set():
            urgent = self._urgent.is_set()
            self._urgent.clear()
            report = self._make()
            if report != self._delivered:
                with contextlib.suppress(ApiError):
                    await self._deliver(report, patience_seconds=self._interval)
            if urgent and report != self._delivered:
                await self._pause(FASTEST_SECONDS)
                self._urgent.set()
            else:
                await self._pause(self._interval)

    async def _pause(self, seconds: float) -> None:
        """Wait for this time, or until a report is urgent."""
        events = [asyncio.create_task(event.wait()) for event in (self._finishing, self._urgent)]
        await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    async def _deliver_last(self) -> None:
        report = self._make()
        refused_since: float | None = None
        loop = asyncio.get_running_loop()
        while report != self._delivered:
            try:
                await self._deliver(report, patience_seconds=PAUSE_SECONDS)
            except ApiError as error:
                # 429 and 0 (no answer) are not refusals.
                refused = 400 <= error.status < 500 and error.status != 429
                if refused and await fetch_job_state(self._api, self._job) is JobState.CANCELLED:
                    raise JobDeleted(str(error)) from error
                if refused:
                    refused_since = refused_since or loop.time()
                    if loop.time() - refused_since > REFUSAL_PATIENCE_SECONDS:
                        raise ReportRefused(str(error)) from error
                await asyncio.sleep(PAUSE_SECONDS)

    async def _deliver(self, report: RunnerReport, *, patience_seconds: float) -> None:
        self._delivered = None
        try:
            await self._api.apply_report(self._shard, report.wire(), patience_seconds=patience_seconds)
        except ApiError as error:
            if not self._away:
                log.warning("the API server refuses the report; rollouts continue: %s", error)
            self._away = True
            raise
        if self._away:
            log.info("the API server accepts reports again")
        self._away, self._delivered = False, report
