"""`rolloutctl diff`: compare two runs by task."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.text import Text

from agent_runtime.recording.job_record import differences
from agent_runtime.recording.reader import RunFolder
from agent_runtime.recording.seals import SealedResults
from agent_runtime.statistics import Difference, mean, paired_difference
from rollout_api.records import Outcome
from rolloutctl.runs import find_run_folder
from rolloutctl.ui.console import Form, FormOption, answer_json, answer_table, harmless, number, out

TASKS = 50
"""Most rows of the table, the tasks with the largest differences. JSON has all."""

_RUN = "A run: a name in ./out, a manifest (its output.uri), or the folder or URI of a run."


@dataclass(frozen=True)
class Comparison:
    """Two runs by task. Means are of graded rollouts."""

    before: str
    after: str
    tasks: Mapping[str, tuple[float, float]]
    """Mean reward before and after, of the tasks that both runs have graded."""
    only_before: list[str]
    only_after: list[str]
    difference: Difference | None
    """None without a common task."""
    manifest: list[str]
    """How the manifest changed: lines `field: before → after`."""


async def diff(
    before: Annotated[str, typer.Argument(metavar="RUN", help=_RUN)],
    after: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare with it.")],
    form: FormOption = Form.TEXT,
) -> None:
    """Compare two runs: mean rewards by task, their difference with its confidence interval, and the manifests."""
    found = await _compare(await find_run_folder(before, os.environ), await find_run_folder(after, os.environ))
    if form is Form.JSON:
        answer_json(_json(found))
    else:
        _print(found)


async def _compare(before: RunFolder, after: RunFolder) -> Comparison:
    first, second = await _rewards(before), await _rewards(after)
    common = [task for task in first if task in second]
    return Comparison(
        before=before.folder,
        after=after.folder,
        tasks={task: (mean(first[task]) or 0.0, mean(second[task]) or 0.0) for task in common},
        only_before=[task for task in first if task not in second],
        only_after=[task for task in second if task not in first],
        difference=paired_difference([(first[task], second[task]) for task in common]),
        manifest=differences(before.job_file.manifest["spec"], after.job_file.manifest["spec"], "spec"),
    )


async def _rewards(run: RunFolder) -> Mapping[str, list[float]]:
    """Return the rewards of graded rollouts by task."""
    rewards = defaultdict[str, list[float]](list)
    with contextlib.closing(SealedResults(run.store)) as sealed:
        await sealed.load()
        for result in sealed.values():
            if result.outcome is Outcome.COMPLETED and result.reward is not None:
                rewards[result.task].append(result.reward)
    return rewards


def _print(found: Comparison) -> None:
    changed = sorted(
        ((after - before, task, before, after) for task, (before, after) in found.tasks.items() if before != after),
        key=lambda row: (-abs(row[0]), row[1]),
    )
    if changed:
        shown = sorted(changed[:TASKS])
        rows = [[task, number(before), number(after), signed(change)] for change, task, before, after in shown]
        columns = ["task", found.before, found.after, "difference"]
        answer_table("", columns, rows, right=columns[1:])
    if len(changed) > TASKS:
        _line(f"… and {len(changed) - TASKS} tasks with smaller differences; `-o json` has them all.")
    better = sum(change > 0 for change, *_ in changed)
    counts = [f"{better} better", f"{len(changed) - better} worse", f"{len(found.tasks) - len(changed)} equal"]
    _line(f"{len(found.tasks)} tasks in both runs: {', '.join(counts)}.")
    if (difference := found.difference) is not None:
        interval = difference.interval
        text = "" if interval is None else f" (95 % confidence interval {signed(interval[0])} to {signed(interval[1])})"
        _line(
            f"Mean reward {number(difference.before, 3)} → {number(difference.after, 3)}: {signed(difference.mean)}{text}"
        )
    for folder, tasks in ((found.before, found.only_before), (found.after, found.only_after)):
        if tasks:
            _line(f"Graded only in {folder}: {', '.join(tasks[:10])}{', …' if len(tasks) > 10 else ''}")
    for line in found.manifest:
        _line(f"  {line}")


def signed(value: float) -> str:
    """Format a difference: `+0.25`, `-0.1` or `0`."""
    text = number(value, 3)
    return f"+{text}" if value > 0 and text != "0" else "0" if text == "-0" else text


def _line(text: str) -> None:
    out.print(Text(harmless(text)), soft_wrap=True)


def _json(found: Comparison) -> dict[str, object]:
    difference = found.difference
    return {
        "before": found.before,
        "after": found.after,
        "tasks": {task: {"before": before, "after": after} for task, (before, after) in found.tasks.items()},
        "onlyBefore": found.only_before,
        "onlyAfter": found.only_after,
        "meanBefore": None if difference is None else difference.before,
        "meanAfter": None if difference is None else difference.after,
        "difference": None if difference is None else difference.mean,
        "confidenceInterval": None if difference is None else difference.interval,
        "manifest": found.manifest,
    }
