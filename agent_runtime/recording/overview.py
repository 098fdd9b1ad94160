"""One run in a line: how far it is, and its rewards."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_runtime.recording.job_record import JobFile, parsed_json, read_abort, read_job_file
from agent_runtime.recording.results import statistics_of
from agent_runtime.recording.seals import SealedResults
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import RolloutJob


@dataclass(frozen=True)
class Overview:
    """A run's progress and statistics."""

    folder: str
    job_file: JobFile
    total: int | None
    """Number of rollouts; None for an open stream."""
    finished: bool
    """Its results are written."""
    aborted: str | None
    """Why it was aborted."""
    stats: Mapping[str, Any]
    """As in `stats.json`, of the rollouts that are sealed so far."""
    damaged: str | None = None
    """Which object cannot be read; `stats` is empty then."""

    @property
    def name(self) -> str:
        """Return the name of its job."""
        return str(self.job_file.manifest["metadata"]["name"])

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
    """Return all runs, newest first. A folder without a readable `job.json` is ignored."""
    found = []
    for folder in await store.folders():
        try:
            job_file = await read_job_file(store, folder)
        except RecordCorrupt:
            continue
        if job_file is not None:
            found.append(await _overview(store.below(folder), folder, job_file))
    return sorted(found, key=lambda run: (run.job_file.created, run.folder), reverse=True)


async def _overview(store: Store, folder: str, job_file: JobFile) -> Overview:
    job = RolloutJob.model_validate(job_file.manifest)
    stored, aborted = await store.get("stats.json"), await read_abort(store)
    stats: Mapping[str, Any] = statistics_of(())
    damaged = None
    try:
        stats = await _sealed_statistics(store) if stored is None else parsed_json("stats.json", stored)
    except RecordCorrupt as error:
        damaged = str(error)
    return Overview(
        folder=folder,
        job_file=job_file,
        total=None if job.spec.tasks.stream else job_file.tasks.count * job.spec.group_size,
        finished=stored is not None,
        aborted=None if aborted is None else aborted["message"],
        stats=stats,
        damaged=damaged,
    )


async def _sealed_statistics(store: Store) -> Mapping[str, Any]:
    with contextlib.closing(SealedResults(store)) as sealed:
        await sealed.load()
        return statistics_of(sealed.values())
