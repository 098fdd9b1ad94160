"""One run in a line: how far it is, and its rewards."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.recording.health import HealthReport, error_of, health_reports
from agent_runtime.recording.job_record import parsed_json, read_abort
from agent_runtime.recording.reader import DamagedRun, RunFolder, run_folders
from agent_runtime.recording.results import statistics_of
from agent_runtime.recording.seals import SealedResults
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store

Json = Mapping[str, Any]


class Overview(RunFolder):
    """A run's progress and statistics."""

    def __init__(
        self,
        run: RunFolder,
        *,
        finished: bool,
        aborted: str | None,
        health: Sequence[HealthReport],
        damaged: str | None,
        stats: Json,
    ) -> None:
        super().__init__(run.store, run.folder, run.job_file)
        self.finished = finished
        """Whether its results are written."""
        self.aborted = aborted
        """Why the run was aborted."""
        self.health = health
        """The latest report of each process of an unfinished run."""
        self.damaged = damaged
        """Which object cannot be read; `stats` is empty then."""
        self.stats = stats
        """As in `stats.json`, of the rollouts that are sealed so far."""

    @property
    def error(self) -> str | None:
        """Return the error that ended an unfinished run, in several lines; None if a process works on it, or was stopped."""
        return error_of(self.health)

    @property
    def ended(self) -> float | None:
        """Return the Unix time at which the last rollout ended, None without one."""
        ended: float | None = self.stats.get("ended")  # runs of earlier versions lack it
        return ended

    @property
    def mean(self) -> float | None:
        """Return the mean reward; None without a graded rollout."""
        mean: float | None = self.stats["reward"]["mean"]
        return mean

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean, clustered by group; None with fewer than two groups."""
        error: float | None = self.stats["reward"]["standardError"]
        return error


async def overviews(store: Store) -> tuple[list[Overview], list[DamagedRun]]:
    """Return all runs, newest first, and those whose `job.json` cannot be read."""
    runs, damaged = list[RunFolder](), list[DamagedRun]()
    async for run in run_folders(store):
        if isinstance(run, DamagedRun):
            damaged.append(run)
        else:
            runs.append(run)
    newest_first = sorted(runs, key=lambda run: (run.job_file.created, run.folder), reverse=True)
    return [await overview(run) for run in newest_first], damaged


async def overview(run: RunFolder) -> Overview:
    """Read the progress and statistics of a run."""
    store = run.store
    stored, aborted = await store.get("stats.json"), None
    stats: Json = statistics_of(())
    damaged = None
    try:
        aborted = await read_abort(store)
        stats = await _sealed_statistics(store) if stored is None else parsed_json("stats.json", stored)
    except RecordCorrupt as corrupt:
        damaged = str(corrupt)
    health = await health_reports(store) if stored is None and aborted is None else ()
    reason = None if aborted is None else aborted["message"]
    return Overview(run, finished=stored is not None, aborted=reason, health=health, damaged=damaged, stats=stats)


async def _sealed_statistics(store: Store) -> Json:
    with contextlib.closing(SealedResults(store)) as sealed:
        await sealed.load()
        return statistics_of(sealed.values())
