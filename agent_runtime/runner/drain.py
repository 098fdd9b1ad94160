"""SIGTERM: a job that is gone ends at once; where it goes on elsewhere, the turns that run are finished first."""

import asyncio

from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.runner.job_state import JobApi, JobState, fetch_job_state
from agent_runtime.runner.log import log
from rollout_api.conditions import Metadata

DRAIN_SECONDS = 25.0
"""For the turns that run: the pod's terminationGracePeriodSeconds, 30, less what the last report and the exit take."""


class Stopping:
    """What the engine is told. `cancelled` is set when the job is gone: then nothing is worth waiting for."""

    def __init__(self, api: JobApi, job: Metadata, *, seconds: float = DRAIN_SECONDS) -> None:
        self._api, self._job, self._seconds = api, job, seconds
        self.drain, self.stop, self.cancelled = Drain(), asyncio.Event(), asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._work is not None

    def begin(self) -> None:
        """Handle SIGTERM; a second one changes nothing."""
        if self._work is None:
            log.info("asked to stop: no turn starts any more, those that run come to their end")
            # Before the API server is asked: it may be away.
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
