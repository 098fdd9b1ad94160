"""Run one shard of a job to its end: combines engine, reports, metrics, log and SIGTERM handling."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from agent_runtime.engine.events import Event, JobStarted, JobSummary, RolloutSealed
from agent_runtime.engine.run import run_job
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.extensions import ExtensionError
from agent_runtime.kube.api import ApiError
from agent_runtime.models.base import ModelError
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.recording.job_record import ManifestChanged, NameTaken
from agent_runtime.recording.journal import Superseded
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError
from agent_runtime.runner.drain import Stopping
from agent_runtime.runner.event_log import log_event
from agent_runtime.runner.job_state import JobApi
from agent_runtime.runner.log import log, write_termination_log
from agent_runtime.runner.metrics import RunnerMetrics
from agent_runtime.runner.model_server import model_server_name
from agent_runtime.runner.predecessor import patience, wait_for_predecessor
from agent_runtime.runner.report import (
    JobDeleted,
    Reporter,
    ReportRefused,
    ShardTally,
    previous_report,
    report_interval,
)
from agent_runtime.runner.supervisor import Exit
from agent_runtime.sandboxes.base import Fenced, SandboxFailure, SandboxProvider
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from agent_runtime.shared_tasks import ended_before
from agent_runtime.tasks import TaskSourceError, TaskSourceUnavailable
from rollout_api.cluster import shard_name
from rollout_api.rollout_job import RolloutJob, RunnerReport, RunnerState
from rollout_api.sandbox import Provider

T = TypeVar("T")

LAST_REPORT_SECONDS = 3.0
"""Time for the last report of a pod that must end, or whose successor will report the same."""

_KNOWN: tuple[tuple[type[Exception], Exit], ...] = (
    (TaskSourceUnavailable, Exit.STORAGE),
    (TaskSourceError, Exit.BAD_JOB),
    (ExtensionError, Exit.BAD_JOB),
    (ManifestChanged, Exit.BAD_JOB),
    (NameTaken, Exit.BAD_JOB),
    (AgentBroken, Exit.AGENT),
    (ModelError, Exit.MODEL),
    (SandboxFailure, Exit.SANDBOXES),
    (StorageError, Exit.STORAGE),
    (RecordCorrupt, Exit.STORAGE),
    (Superseded, Exit.SUPERSEDED),
    (Fenced, Exit.SUPERSEDED),
)
"""Errors that end a run, with their exit codes. Only BAD_JOB of a shard that never worked is permanent, because a job's
spec is immutable. All others may be fixed.
"""


class _Stopped(Exception):
    """The process must end before the run has begun."""


@dataclass(frozen=True)
class Ending:
    """Result of the engine: the exit code, and the contents of the last report."""

    exit: Exit
    state: RunnerState
    message: str = ""


def ending_of(result: JobSummary | Exception) -> Ending | None:
    """Return the consequence of a run's summary, or of the error that ended it; None for an unexpected error."""
    if isinstance(result, JobSummary):
        if result.aborted is not None:
            return Ending(Exit.REPORTED, RunnerState.ABORTED, result.aborted)
        if result.completed:
            return Ending(Exit.REPORTED, RunnerState.COMPLETED)
        return Ending(Exit.DRAINED, RunnerState.DRAINING)
    if isinstance(result, _Stopped):
        return Ending(Exit.DRAINED, RunnerState.DRAINING)
    code = next((code for kind, code in _KNOWN if isinstance(result, kind)), None)
    if code is None:
        return None
    return Ending(code, RunnerState.ABORTED if code is Exit.BAD_JOB else RunnerState.RUNNING, str(result))


class ShardRun:
    """The work of this process. `on_sealed` is called after each seal.

    `open_model` returns the model of a job with a ModelServer, and None for others.
    """

    def __init__(
        self,
        job: RolloutJob,
        shard: Shard,
        *,
        api: JobApi,
        tally: ShardTally,
        metrics: RunnerMetrics,
        open_model: Callable[[], Awaitable[ServedModel | None]],
        on_sealed: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._shard, self._api = job, shard, api
        self._tally, self._metrics, self._on_sealed = tally, metrics, on_sealed
        self._ending: Ending | None = None
        self._waits_for: Callable[[], str] = lambda: ""
        self._wanted: Callable[[], Mapping[str, int]] = dict
        """Places that it wants in each SandboxPool."""
        self._open_model = open_model
        self._served: ServedModel | None = None
        self._before: RunnerReport | None = None
        self._drains = 0
        """Drains of earlier runners of this shard."""
        self._stopping = Stopping(api, job.metadata)
        self._reporter = Reporter(
            api, job.metadata, index=shard.index, interval_seconds=report_interval(shard.count), make=self._report
        )

    async def run(self, provider: Provider | SandboxProvider, base_dir: Path, environ: Mapping[str, str]) -> Exit:
        """Run until the shard is complete or aborted, or this process must end. Raises unexpected errors."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._begin_to_stop)
        if isinstance(provider, ClusterProvider):
            self._waits_for, self._wanted = provider.waits_for, provider.wanted
        result = await self._unless_cancelled(self._result(provider, base_dir, environ))
        if result is None:
            log.info("the RolloutJob was deleted: ending at once; sealed rollouts stay in storage")
            return Exit.CANCELLED
        self._ending = ending_of(result)
        if self._ending is None:
            assert isinstance(result, Exception)
            raise result
        if isinstance(result, Exception):
            write_termination_log(str(result))
        if self._ending.exit is Exit.SUPERSEDED:
            # The other runner reports on this shard now.
            return Exit.SUPERSEDED
        return await self._send_final_report(self._ending)

    async def _result(
        self, provider: Provider | SandboxProvider, base_dir: Path, environ: Mapping[str, str]
    ) -> JobSummary | Exception:
        try:
            self._drains = await wait_for_predecessor(
                self._api,
                self._job.metadata,
                self._shard.index,
                self._stopping.drain,
                seconds=patience(environ, time.monotonic()),
            )
            if self._stopping.begun:
                raise _Stopped
            async with contextlib.AsyncExitStack() as stack:
                self._served = await self._open_model()
                if self._served is not None:
                    stack.push_async_callback(self._served.close)
                    await self._start_with(self._served)
                return await run_job(
                    self._job,
                    base_dir=base_dir,
                    environ=environ,
                    provider=provider,
                    model=self._served,
                    observer=self._observe,
                    stop=self._stopping.stop,
                    shard=self._shard,
                    drain=self._stopping.drain,
                )
        except Exception as error:  # noqa: BLE001 - `ending_of` classifies it; unknown errors are raised again
            return error

    def _begin_to_stop(self) -> None:
        self._stopping.begin()
        # Report the drain immediately: the next runner may have started, and only waits for a draining one.
        self._reporter.report_now()

    async def _start_with(self, model: ServedModel) -> None:
        """Wait until the model can be called, which takes as long as loading its weights."""
        model.on_acknowledged = self._reporter.report_now
        server = model_server_name(self._job)
        assert server is not None, "a ServedModel without a ModelServer in the job"
        self._metrics.watch_model(model, server)
        log.info("waiting for a server of %s", model.name)
        if (check := await ended_before(self._stopping.drain.wait(), model.check())) is None:
            raise _Stopped
        check.result()

    async def _send_final_report(self, ending: Ending) -> Exit:
        """Send the last report: the shard's end reliably, any other state only within a short time."""
        has_worked = True  # assumed if the API server does not answer
        if not self._tally.started:
            with contextlib.suppress(ApiError):
                name = shard_name(self._job.metadata.name, self._job.metadata.uid or "", self._shard.index)
                shard = await self._api.get_shard(name, patience_seconds=LAST_REPORT_SECONDS)
                self._before = previous_report(shard)
                has_worked = self._before is not None and self._before.state is not RunnerState.ABORTED
        if ending.exit is Exit.BAD_JOB and has_worked:
            # The shard has worked before, so the spec is valid and the problem may be temporary, such as an unavailable
            # plugin server.
            ending = self._ending = replace(ending, state=RunnerState.RUNNING)
        is_verdict = ending.state in (RunnerState.COMPLETED, RunnerState.ABORTED)
        patience = None if is_verdict and not self._stopping.begun else LAST_REPORT_SECONDS
        try:
            told = await self._unless_cancelled(self._finish(patience))
        except JobDeleted:
            return Exit.CANCELLED
        except ReportRefused as error:
            write_termination_log(f"the API server refuses the report of this shard: {error}")
            return Exit.UNREPORTED
        if told is None:
            return Exit.CANCELLED
        return ending.exit if told or not is_verdict else Exit.UNREPORTED

    async def _finish(self, patience: float | None) -> bool:
        """Return whether the last report was sent. Without a limit, SIGTERM ends the wait after a while."""
        if patience is None:
            finished = await ended_before(self._stopping.stop.wait(), self._reporter.finish())
            if finished is None:
                return False
            finished.result()  # raises its errors
            return True
        try:
            await self._reporter.finish(within_seconds=patience)
        except TimeoutError:
            return False
        return True

    async def _unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result, or None as soon as the job is known to be deleted."""
        task = asyncio.create_task(work)
        cancelled = asyncio.create_task(self._stopping.cancelled.wait())
        await asyncio.wait({task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        return await task if task.done() else None

    def _report(self) -> RunnerReport:
        state = RunnerState.DRAINING if self._stopping.begun else RunnerState.RUNNING
        message = self._troubles() if self._ending is None else self._ending.message
        if self._ending is not None:
            state = self._ending.state
        drains = self._drains + self._stopping.begun
        if self._before is not None:
            update = {"state": state, "message": message, "running": 0, "pools": {}, "drains": drains}
            return self._before.model_copy(update=update)
        report = self._tally.report(state, message or self._tally.trouble).model_copy(update={"drains": drains})
        if self._ending is None:
            report = report.model_copy(update={"pools": dict(self._wanted())})
        return report.model_copy(update={"policy_update": self._served.acknowledged}) if self._served else report

    def _troubles(self) -> str:
        return self._waits_for() or (self._served.waits_for() if self._served is not None else "")

    def _observe(self, event: Event) -> None:
        self._tally.observe(event)
        self._metrics.observe(event)
        log_event(event)
        if isinstance(event, JobStarted):
            self._reporter.start()
        elif isinstance(event, RolloutSealed):
            self._on_sealed()
