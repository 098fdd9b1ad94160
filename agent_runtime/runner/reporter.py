"""Sends reports to the API server: rate-limited, only after changes. The last report is retried until it is accepted."""

import asyncio
import contextlib
from collections.abc import Callable

from agent_runtime.kube.api import ApiError
from agent_runtime.runner.job_state import JobApi, JobState, fetch_job_state
from agent_runtime.runner.log import log
from agent_runtime.runner.report import FASTEST_SECONDS
from rollout_api.cluster import shard_name
from rollout_api.conditions import Metadata
from rollout_api.rollout_job import RunnerReport

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

        Raises JobGone, ReportRefused, and TimeoutError at the limit.
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
