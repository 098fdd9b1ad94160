"""`rolloutctl results`: show the results of a run by group."""

import contextlib
import os
from collections.abc import Collection

from agent_runtime.recording.health import last_error
from agent_runtime.recording.results import statistics_of
from agent_runtime.recording.seals import SealedResults
from agent_runtime.statistics import with_advantages
from rollout_api.records import Outcome, Result
from rolloutctl.runs import NewestJobArgument, find_run_folder
from rolloutctl.ui.console import Form, FormOption, answer_json_list, answer_table, number, out, percent, say
from rolloutctl.ui.figures import GroupFigures, group_figures

GROUPS = 50
"""Most rows of the table, the worst groups. For runs with more tasks, use the report or JSON."""


async def results(job: NewestJobArgument = None, form: FormOption = Form.TEXT) -> None:
    """Show the results of a run by group, also while it runs. With -o json, print the list of results."""
    run = await find_run_folder(job, os.environ)
    with contextlib.closing(SealedResults(run.store)) as sealed:
        await sealed.load()
        if form is Form.JSON:
            answer_json_list(result.wire() for result in with_advantages(sealed.values(), run.job.spec.reward))
        else:
            print_results(run.folder, sealed.values(), run.total, run.job.spec.group_size)
            if (error := await last_error(run.store)) is not None:
                say(f"The run ended with an error: {error}", "red")


def print_results(name: str, ended: Collection[Result], total: int | None, group_size: int) -> None:
    groups = group_figures(ended, group_size)
    overall = statistics_of(ended)
    reward, pass_at = overall["reward"], overall["passAtK"]
    k = group_size
    columns = ["task", "graded", "mean", "std", "pass@1", *([f"pass@{k}"] if k > 1 else []), "ended"]
    worst_first = sorted(groups, key=lambda group: -1.0 if group.mean is None else group.mean)
    rows = [_row(group, k) for group in worst_first[:GROUPS]]
    answer_table(name, columns, rows, right=columns[1:-1], optional=("std", "graded", "pass@1", f"pass@{k}"))
    if len(groups) > GROUPS:
        better = len(groups) - GROUPS
        out.print(f"… and {better} better groups; `-o json` and `rolloutctl report` have them all.", soft_wrap=True)
    done = f"{len(ended)} of {total}" if total is not None else str(len(ended))
    error = "" if reward["standardError"] is None else f" ± {number(reward['standardError'], 3)}"
    line = f"{done} {'rollout' if done == '1' else 'rollouts'}, mean reward {number(reward['mean'], 3)}{error}"
    line += f", pass@1 {percent(pass_at.get('1'))}"
    line += f", pass@{k} {percent(pass_at.get(str(k)))}" if k > 1 else ""
    masked = len(ended) - overall["outcomes"].get(Outcome.COMPLETED, 0)
    out.print(line + (f", {masked} masked" if masked else ""), soft_wrap=True)
    out.print()


def _row(group: GroupFigures, k: int) -> list[str]:
    rates = [percent(group.pass_at_1), *([percent(group.pass_at_k)] if k > 1 else [])]
    ended = ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in group.outcomes.items())
    return [group.task, str(group.graded), number(group.mean), number(group.std), *rates, ended]
