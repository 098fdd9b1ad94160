"""Kubernetes starts a runner while the one before it still drains; it lets that one finish its turns, then takes over."""

import asyncio
import contextlib
from collections.abc import Mapping

from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.kube.api import ApiError
from agent_runtime.runner.job_state import ASK_SECONDS, JobApi
from agent_runtime.runner.log import log
from agent_runtime.runner.report import standing_report
from agent_runtime.runner.supervisor import SINCE
from rollout_api.cluster import shard_name
from rollout_api.conditions import Metadata
from rollout_api.rollout_job import RunnerReport, RunnerState

LONGEST_SECONDS = 30.0
"""The pod's terminationGracePeriodSeconds: whoever still drains after that was killed, and could not say so."""
LOOK_SECONDS = 1.0
"""As often as runners report."""


def is_draining(report: RunnerReport | None) -> bool:
    """Whether turns are still being finished. In the last report of a drain none is at work any more."""
    return report is not None and report.state is RunnerState.DRAINING and report.running > 0


def patience(environ: Mapping[str, str], now: float) -> float:
    """Seconds that a predecessor can still drain, `now` by time.monotonic(): its time ran out for earlier engines too."""
    return max(0.0, LONGEST_SECONDS - (now - float(environ.get(SINCE, now))))


async def wait_for_predecessor(api: JobApi, job: Metadata, index: int, drain: Drain, *, seconds: float) -> None:
    """Return when no earlier runner of this shard finishes turns any more, or this one is asked to stop itself."""
    shard, waits = shard_name(job.name, job.uid or "", index), False
    with contextlib.suppress(TimeoutError, ApiError):
        async with asyncio.timeout(seconds):
            while not drain.requested:
                found = await api.get_shard(shard, patience_seconds=ASK_SECONDS)
                if not is_draining(standing_report(found)):
                    return
                if not waits:
                    log.info("the runner before this one finishes its turns; this one takes over then")
                waits = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await drain.wait()
