"""Kubernetes may start a runner while its predecessor still drains. The runner waits until the predecessor has finished
its turns, then takes over.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.kube.api import ApiError
from agent_runtime.runner.job_state import ASK_SECONDS, JobApi
from agent_runtime.runner.log import log
from agent_runtime.runner.report import previous_report
from agent_runtime.runner.supervisor import SINCE
from rollout_api.cluster import shard_name
from rollout_api.conditions import Metadata
from rollout_api.rollout_job import RunnerReport, RunnerState

LONGEST_SECONDS = 30.0
"""The pod's terminationGracePeriodSeconds, after which a predecessor is killed."""
POLL_SECONDS = 1.0
"""Interval of runners' reports."""


def is_draining(report: RunnerReport | None) -> bool:
    """Whether the predecessor still finishes turns. The last report of a drain has no running rollouts."""
    return report is not None and report.state is RunnerState.DRAINING and report.running > 0


def patience(environ: Mapping[str, str], now: float) -> float:
    """Return for how many seconds a predecessor can still drain. Time of earlier engines in this container counts too.
    `now` is from time.monotonic().
    """
    return max(0.0, LONGEST_SECONDS - (now - float(environ.get(SINCE, now))))


async def wait_for_predecessor(api: JobApi, job: Metadata, index: int, drain: Drain, *, seconds: float) -> int:
    """Return when no earlier runner of this shard finishes turns any more, or this one is asked to stop. Returns how many
    of them have drained, as far as it is known.
    """
    shard, waits, drains = shard_name(job.name, job.uid or "", index), False, 0
    with contextlib.suppress(TimeoutError, ApiError):
        async with asyncio.timeout(seconds):
            while not drain.requested:
                report = previous_report(await api.get_shard(shard, patience_seconds=ASK_SECONDS))
                drains = drains if report is None else report.drains
                if not is_draining(report):
                    break
                if not waits:
                    log.info("the previous runner is finishing its turns; this one takes over afterwards")
                waits = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await drain.wait()
    return drains
