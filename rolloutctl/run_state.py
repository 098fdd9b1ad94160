"""The state of a recorded run in one word, as `ls` and the viewer show it."""

import time
from collections.abc import Sequence

from agent_runtime.engine.run_folder import holder
from agent_runtime.recording.health import HealthReport, is_working


def is_alive(uid: str, reports: Sequence[HealthReport]) -> bool:
    """Whether a process works on the run with that id: one here that holds it, or one elsewhere that has reported."""
    now = time.time()
    return any(is_working(report, now) for report in reports) or holder(uid) is not None


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
    return "running" if is_alive(uid, reports) else "unfinished"
