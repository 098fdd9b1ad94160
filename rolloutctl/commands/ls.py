"""`rolloutctl ls`: list runs."""

import os
from collections.abc import Callable
from datetime import UTC, datetime

from agent_runtime.engine.run_folder import holder
from agent_runtime.recording.overview import Overview, overviews
from rollout_api.records import Outcome
from rolloutctl.completion import DEFAULT_OUTPUT
from rolloutctl.errors import CommandError
from rolloutctl.runs import WhereArgument, open_place
from rolloutctl.ui.console import Form, FormOption, answer_json, answer_table, number, percent, say


async def ls(where: WhereArgument = DEFAULT_OUTPUT, form: FormOption = Form.TEXT) -> None:
    """List runs, newest first: state, finished rollouts, mean reward ± its standard error, pass@1."""
    store, place = await open_place(where, os.environ)
    runs = [run for run in await overviews(store) if place.name in (None, run.folder, run.job.metadata.name)]
    if place.name is not None and not runs:
        raise CommandError(f"{place.uri} contains no run of {place.name!r}; `rolloutctl ls {place.uri}` lists all")
    if form is Form.JSON:
        answer_json([_json(run) for run in runs])
        return
    columns = {name: [cell(run) for run in runs] for name, cell in _CELLS.items()}
    rows = zip(*columns.values(), strict=True)
    answer_table("", list(columns), rows, right=list(columns)[2:-1], optional=("masked", "pass@1", "started", "state"))
    for run in runs:
        if run.damaged is not None:
            say(f"{run.folder} is damaged: {run.damaged}", "red")
    if not runs:
        say(f"{place.uri} contains no run.")


def _state(run: Overview) -> str:
    """Return the run's state: `running` only if a process of this machine runs it, because others cannot be detected."""
    if run.damaged is not None:
        return "damaged"
    if run.aborted is not None:
        return "aborted"
    if run.finished:
        return "finished"
    return "running" if holder(run.job_file.uid) else "unfinished"


def _progress(run: Overview) -> str:
    return f"{run.stats['rollouts']} of {'…' if run.total is None else run.total}"


def _mean(run: Overview) -> str:
    error = "" if run.standard_error is None else f" ± {number(run.standard_error, 3)}"
    return f"{number(run.mean, 3)}{error}"


def _masked(run: Overview) -> int:
    masked: int = run.stats["rollouts"] - run.stats["outcomes"].get(Outcome.COMPLETED, 0)
    return masked


def _started(run: Overview) -> str:
    return datetime.fromtimestamp(run.job_file.created, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


_CELLS: dict[str, Callable[[Overview], str]] = {
    "run": lambda run: run.folder,
    "state": _state,
    "rollouts": _progress,
    "mean": _mean,
    "pass@1": lambda run: percent(run.stats["passAtK"].get("1")),
    "masked": lambda run: str(_masked(run)),
    "started": _started,
}


def _json(run: Overview) -> dict[str, object]:
    return {
        "folder": run.folder,
        "name": run.job.metadata.name,
        "state": _state(run),
        "created": run.job_file.created,
        "total": run.total,
        "sealed": run.stats["rollouts"],
        "meanReward": run.mean,
        "standardError": run.standard_error,
        "passAt1": run.stats["passAtK"].get("1"),
        "masked": _masked(run),
        "aborted": run.aborted,
        "damaged": run.damaged,
    }
