"""`rolloutctl ls`: list runs."""

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from agent_runtime.recording.overview import Overview, overviews
from agent_runtime.recording.reader import DamagedRun
from rollout_api.records import Outcome
from rolloutctl.completion import DEFAULT_OUTPUT, RUN_FOLDER
from rolloutctl.errors import CommandError
from rolloutctl.run_state import state_of_overview
from rolloutctl.runs import WhereArgument, open_place
from rolloutctl.ui.console import Form, FormOption, answer_json, answer_table, number, percent, say
from rolloutctl.ui.figures import shortened_line


async def ls(where: WhereArgument = DEFAULT_OUTPUT, form: FormOption = Form.TEXT) -> None:
    """List runs, newest first: state, finished rollouts, mean reward ± its standard error, pass@1."""
    store, place = await open_place(where, os.environ)
    readable, unreadable = await overviews(store)
    runs = [run for run in readable if place.name in (None, run.folder, run.job.metadata.name)]
    damaged = [run for run in unreadable if place.name in (None, run.folder, _name_of(run))]
    if place.name is not None and not runs and not damaged:
        raise CommandError(f"{place.uri} contains no run of {place.name!r}; `rolloutctl ls {place.uri}` lists all")
    if form is Form.JSON:
        answer_json([*map(_json, runs), *map(_json_of_damaged, damaged)])
        return
    rows = [[cell(run) for cell in _CELLS.values()] for run in runs]
    rows += [[run.folder, "damaged", *[""] * (len(_CELLS) - 2)] for run in damaged]
    columns = list(_CELLS)
    answer_table("", columns, rows, right=columns[2:-1], optional=("masked", "pass@1", "started", "state"))
    _say_problems(runs, damaged)
    if not rows:
        say(f"{place.uri} contains no run.")


def _name_of(run: DamagedRun) -> str | None:
    """Return the name of its job, from the name of its folder."""
    found = RUN_FOLDER.fullmatch(run.folder)
    return found["name"] if found else None


def _say_problems(runs: Sequence[Overview], damaged: Sequence[DamagedRun]) -> None:
    for run in runs:
        if run.damaged is not None:
            say(f"{run.folder} is damaged: {run.damaged}", "red")
        elif run.error is not None:
            say(f"{run.folder} ended with an error: {shortened_line(run.error)}", "red")
    for unreadable in damaged:
        say(f"{unreadable.folder} is damaged: {unreadable.problem}", "red")


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
    "state": state_of_overview,
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
        "state": state_of_overview(run),
        "created": run.job_file.created,
        "total": run.total,
        "sealed": run.stats["rollouts"],
        "meanReward": run.mean,
        "standardError": run.standard_error,
        "passAt1": run.stats["passAtK"].get("1"),
        "masked": _masked(run),
        "aborted": run.aborted,
        "error": run.error,
        "damaged": run.damaged,
    }


def _json_of_damaged(run: DamagedRun) -> dict[str, object]:
    return {"folder": run.folder, "name": _name_of(run), "state": "damaged", "damaged": run.problem}
