"""Handling of SIGTERM: if the job was deleted, the process ends immediately; otherwise running turns are finished
first.
"""

import asyncio

from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.runner.job_state import JobApi, JobState, fetch_job_state
from agent_runtime.runner.log import log
from rollout_api.conditions import Metadata

DRAIN_SECONDS = 25.0
"""Time for running turns: the pod's terminationGracePeriodSeconds, 30, minus the time for the last report and the exit.
"""


class Stopping:
    """Stop requests for the engine. `cancelled` is set if the job was deleted: then nothing is waited for."""

    def __init__(self, api: JobApi, job: Metadata, *, seconds: float = DRAIN_SECONDS) -> None:
        self._api, self._job, self._seconds = api, job, seconds
        self.drain, self.stop, self.cancelled = Drain(), asyncio.Event(), asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._work is not None

    def begin(self) -> None:
        """Handle SIGTERM; a second one has no effect."""
        if self._work is None:
            log.info("asked to stop: no new turn starts, and running turns are finished")
            # Before the API server is asked, which may be unavailable.
            self.drain.request()
            self._work = asyncio.create_task(self._carry_out())

    async def _carry_out(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        if await fetch_job_state(self._api, self._job) is JobState.CANCELLED:
            self.cancelled.set()
            return
        await asyncio.sleep(end - loop.time())
        self.stop.set()
