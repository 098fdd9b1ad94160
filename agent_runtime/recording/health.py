"""Reports of the processes of a run on what they wait for, and what ended them (`health/<shard>.json`)."""

from collections.abc import Iterable
from typing import Final

from agent_runtime.recording.segments import RecordCorrupt, validated
from agent_runtime.recording.store import Store
from rollout_api.base import ApiModel

HEALTH: Final = "health"
ALIVE_SECONDS: Final = 30.0
"""A process whose last report is older than this has died, or cannot reach storage."""


class HealthReport(ApiModel):
    """The state of one process of a run. It is replaced when it changes, at most every 0.5 s, and at least every 10 s."""

    time: float
    """Unix time of the report."""
    ended: bool = False
    """Whether the process has stopped working on the run."""
    error: str | None = None
    """The error that ended the process's work on the run, with a traceback if it came from the agent's own code."""
    failing_calls: int = 0
    """Rollouts whose model call failed and is being retried."""
    call_retries: int = 0
    """Retries of model calls so far."""
    rate_limited_calls: int = 0
    """Those of them because of a response with status 429."""
    call_problem: str | None = None
    """The latest error of a call that is being retried."""
    silent_seconds: float = 0
    """Seconds without an answer of the model, although calls wait; 0 if it answers."""
    silent_place: str | None = None
    """The model server that does not answer."""
    storage_failures: int = 0
    """Failed requests to storage in the last minute."""
    sandboxes: dict[str, int] = {}
    """Sandboxes of this process by state: `Starting`, `Ready`."""
    sandbox_problem: str | None = None
    """Why sandboxes do not start, for example an image that cannot be pulled, or a full quota."""
    lost_attempts: dict[str, int] = {}
    """Attempts that this process lost to infrastructure, by reason."""


async def health_reports(store: Store) -> list[HealthReport]:
    """Return the latest report of each process. A report that cannot be read is left out."""
    keys = [meta.key for meta in await store.list(HEALTH)]
    reports = []
    for key, data in zip(keys, await store.get_all(keys), strict=True):
        try:
            reports.append(validated(key, HealthReport.model_validate_json, data or b""))
        except RecordCorrupt:
            continue  # written by a later version
    return reports


async def last_error(store: Store) -> str | None:
    """Return the error that ended an unfinished run. None if none did, or if a process works on it again."""
    return error_of(await health_reports(store))


def error_of(reports: Iterable[HealthReport]) -> str | None:
    """Return the error that ended an unfinished run, of its latest reports."""
    return next((report.error for report in reports if report.error is not None), None)


def is_working(report: HealthReport, now: float) -> bool:
    """Return whether the process of a report works on the run at that Unix time."""
    return not report.ended and now - report.time < ALIVE_SECONDS
