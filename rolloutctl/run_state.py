"""The state of a recorded run in one word, as `ls` and the viewer show it."""

import time
from collections.abc import Iterable, Sequence

from agent_runtime.engine.run_folder import holder
from agent_runtime.recording.health import HealthReport, is_working
from agent_runtime.recording.overview import Overview


def state_of_overview(run: Overview) -> str:
    """Return the state of a run as its overview was read; see `state_of`."""
    return state_of(
        run.job_file.uid,
        run.health,
        finished=run.finished,
        sealed=run.stats["rollouts"],
        aborted=run.aborted,
        damaged=run.damaged,
    )


def state_of(
    uid: str,
    reports: Sequence[HealthReport],
    *,
    finished: bool,
    sealed: int,
    aborted: str | None,
    damaged: str | None = None,
) -> str:
    """Return `damaged`, `aborted`, `failed to start`, `finished`, `running` or `unfinished`."""
    if damaged is not None:
        return "damaged"
    if aborted is not None:
        return "aborted" if sealed else "failed to start"
    if finished:
        return "finished"
    return "running" if is_worked_on(uid, reports) else "unfinished"


def is_worked_on(uid: str, reports: Iterable[HealthReport]) -> bool:
    """Return whether a process here holds the run, or one elsewhere has reported."""
    return holder(uid) is not None or any(is_working(report, time.time()) for report in reports)
