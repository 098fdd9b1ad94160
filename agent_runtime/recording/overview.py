"""One run in a line: how far it is, and its rewards."""

import contextlib
from collections.abc import Mapping
from typing import Any

from agent_runtime.recording.job_record import job_files, parsed_json, read_abort
from agent_runtime.recording.reader import RunFolder
from agent_runtime.recording.results import statistics_of
from agent_runtime.recording.seals import SealedResults
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store

Json = Mapping[str, Any]


class Overview(RunFolder):
    """A run's progress and statistics."""

    def __init__(
        self, run: RunFolder, *, ended: float | None, aborted: str | None, damaged: str | None, stats: Json
    ) -> None:
        super().__init__(run.store, run.folder, run.job_file)
        self.ended = ended
        """Unix time at which its results were written; None if they are not."""
        self.aborted = aborted
        """Why the run was aborted."""
        self.damaged = damaged
        """Which object cannot be read; `stats` is empty then."""
        self.stats = stats
        """As in `stats.json`, of the rollouts that are sealed so far."""

    @property
    def finished(self) -> bool:
        """Return whether its results are written."""
        return self.ended is not None

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


async def overviews(store: Store) -> list[Overview]:
    """Return all runs, newest first."""
    runs = [RunFolder(store.below(folder), folder, job_file) async for folder, job_file in job_files(store)]
    newest_first = sorted(runs, key=lambda run: (run.job_file.created, run.folder), reverse=True)
    return [await overview(run) for run in newest_first]


async def overview(run: RunFolder) -> Overview:
    """Read the progress and statistics of a run."""
    store = run.store
    stored, aborted = await store.get("stats.json"), await read_abort(store)
    ended = None if stored is None else await store.modified("stats.json")
    stats: Json = statistics_of(())
    damaged = None
    try:
        stats = await _sealed_statistics(store) if stored is None else parsed_json("stats.json", stored)
    except RecordCorrupt as error:
        damaged = str(error)
    reason = None if aborted is None else aborted["message"]
    return Overview(run, ended=ended, aborted=reason, damaged=damaged, stats=stats)


async def _sealed_statistics(store: Store) -> Json:
    with contextlib.closing(SealedResults(store)) as sealed:
        await sealed.load()
        return statistics_of(sealed.values())
