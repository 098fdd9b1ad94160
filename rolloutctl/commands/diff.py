"""`rolloutctl diff`: compare two runs by task."""

import os
from typing import Annotated

import typer

from rolloutctl.comparison import Comparison, compare
from rolloutctl.completion import complete_run
from rolloutctl.runs import RUN_HELP, find_run_folder
from rolloutctl.ui.console import Form, FormOption, amount, answer_json, answer_table, answer_text, number

TASKS = 50
"""Most rows of the table, the tasks with the largest differences. JSON has all."""


async def diff(
    before: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    after: Annotated[
        str, typer.Argument(metavar="RUN", help="The run to compare with it.", autocompletion=complete_run)
    ],
    form: FormOption = Form.TEXT,
) -> None:
    """Compare two runs: mean rewards by task, their difference with its confidence interval, and the manifests."""
    found = await compare(await find_run_folder(before, os.environ), await find_run_folder(after, os.environ))
    if form is Form.JSON:
        answer_json(found.wire())
    else:
        _print(found)


def _print(found: Comparison) -> None:
    changed = sorted(
        ((after - before, task, before, after) for task, (before, after) in found.tasks.items() if before != after),
        key=lambda row: (-abs(row[0]), row[1]),
    )
    if changed:
        shown = sorted(changed[:TASKS])
        rows = [[task, number(before), number(after), _signed(change)] for change, task, before, after in shown]
        columns = ["task", found.before, found.after, "difference"]
        answer_table("", columns, rows, right=columns[1:])
    if len(changed) > TASKS:
        answer_text(f"… and {amount(len(changed) - TASKS, 'task')} with smaller differences; `-o json` has them all.")
    better = sum(change > 0 for change, *_ in changed)
    counts = [f"{better} better", f"{len(changed) - better} worse", f"{len(found.tasks) - len(changed)} equal"]
    answer_text(f"{amount(len(found.tasks), 'task')} in both runs: {', '.join(counts)}.")
    if (difference := found.difference) is not None:
        interval = difference.interval
        text = "no confidence interval of one task"
        if interval is not None:
            text = f"95 % confidence interval {_signed(interval[0])} to {_signed(interval[1])}"
        answer_text(
            f"Mean reward {number(difference.before, 3)} → {number(difference.after, 3)}: "
            f"{_signed(difference.mean)} ({text})"
        )
    for folder, tasks in ((found.before, found.only_before), (found.after, found.only_after)):
        if tasks:
            answer_text(f"Graded only in {folder}: {', '.join(tasks[:10])}{', …' if len(tasks) > 10 else ''}")
    if found.manifest:
        answer_text("Changes of the manifest:")
    for line in found.manifest:
        answer_text(f"  {line}")


def _signed(value: float) -> str:
    """Format a difference: `+0.25`, `-0.1` or `0`."""
    text = number(value, 3)
    return f"+{text}" if value > 0 and text != "0" else "0" if text == "-0" else text
