"""Carries the report to the API server: not too often, only when it changed, and the last one for certain."""

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
"""Between two tries of the last report."""
REFUSAL_PATIENCE_SECONDS = 60.0
"""An API server that starts may refuse what it admits later."""


class JobGone(Exception):
    """There is no such RolloutJob to report to."""


class ReportRefused(Exception):
    """The API server does not take the report; the message has its words."""


class Reporter:
    """Reports of one runner; `make` gives the report as of now."""

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
        """What the API server holds; None when that is not known."""
        self._away = False

    def start(self) -> None:
        """Report from now on. Whatever the API server does, the rollouts go on."""
        self._work = asyncio.create_task(self._report())

    def hurry(self) -> None:
        """Somebody waits for what the next report says: deliver it now, and again every second until it is taken."""
        self._urgent.set()

    async def finish(self, *, within_seconds: float | None = None) -> None:
        """Deliver the last report, waiting for an API server that is away; for ever where no limit is given.

        Raises JobGone, ReportRefused, and TimeoutError at the limit.
        """
        self._finishing.set()
        async with asyncio.timeout(within_seconds):
            if self._work is not None:
                # Two at once could arrive in the wrong order.
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
                await self._rest(FASTEST_SECONDS)
                self._urgent.set()
            else:
                await self._rest(self._interval)

    async def _rest(self, seconds: float) -> None:
        """Wait so long, or until there is something that cannot wait."""
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
                # 429 and 0, no answer, are no refusals.
                refused = 400 <= error.status < 500 and error.status != 429
                if refused and await fetch_job_state(self._api, self._job) is JobState.CANCELLED:
                    raise JobGone(str(error)) from error
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
                log.warning("the API server does not take the report; rollouts go on: %s", error)
            self._away = True
            raise
        if self._away:
            log.info("the API server takes reports again")
        self._away, self._delivered = False, report
