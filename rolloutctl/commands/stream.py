"""`rolloutctl stream`: submit tasks to an open job, and follow its results."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_runtime.engine.session import FinishedGroup
from agent_runtime.recording.stream import StreamClosed
from agent_runtime.statistics import mean
from agent_runtime.tasks import read_rows
from rolloutctl.client import RunAborted
from rolloutctl.errors import EXIT_CODES, CommandError, Exit
from rolloutctl.job_stream import JobStream
from rolloutctl.ui.console import Form, FormOption, amount, answer_json_line, answer_stream, number, out, say

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Submit tasks to an open job, and follow its results."
)
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="URI or folder of the run, its manifest, or its name.")]


@app.command(epilog=EXIT_CODES)
async def submit(
    job: JobArgument,
    tasks: Annotated[str, typer.Argument(help="JSONL file with one task per line; - for standard input.")],
    label: Annotated[str | None, typer.Option(help="Label of the results, such as a batch or a training step.")] = None,
    form: FormOption = Form.TEXT,
) -> None:
    """Submit tasks, each as a group. They are stored durably when this command ends."""
    try:
        data = sys.stdin.buffer.read() if tasks == "-" else Path(tasks).read_bytes()
    except OSError as error:
        raise CommandError(f"{tasks}: {error.strerror}", hint="Give a JSONL file, or - for standard input.") from error
    rows = read_rows(iter([data]), tasks)
    stream = await JobStream.open(job)
    numbers: list[int] = []
    try:
        for task in rows:
            numbers.append(await stream.submit(task, label))
    except BaseException as error:
        done = f"Only the first {len(numbers)} of {len(rows)} tasks were submitted"
        say(f"{done}; remove them from {tasks} before you submit the rest.")
        if not isinstance(error, StreamClosed):
            uncertain = f"The next task, {rows[len(numbers)].name}, may have been submitted too"
            say(f"{uncertain}; before you submit it again, look for it in the last files of {stream.uri}/stream.")
        raise
    if form is Form.JSON:
        answer_stream().write(json.dumps(numbers) + "\n")
    else:
        say(f"Submitted {len(numbers)} groups, {numbers[0]} to {numbers[-1]}.")


@app.command(epilog=EXIT_CODES)
async def tail(
    job: JobArgument,
    skip: Annotated[list[int] | None, typer.Option(help="Number of a group to leave out; may be repeated.")] = None,
    form: FormOption = Form.TEXT,
) -> None:
    """Print finished groups until the stream is closed and all are finished. With -o json, one object per line."""
    stream = await JobStream.open(job)
    try:
        async for group in stream.groups(skip or []):
            _print(group, form)
    except RunAborted as aborted:
        raise CommandError(f"The run was aborted: {aborted}", code=Exit.ABORTED) from aborted


@app.command(epilog=EXIT_CODES)
async def close(job: JobArgument) -> None:
    """Close the stream: the job completes when all its groups are finished."""
    say(f"Closed the stream; it has {await (await JobStream.open(job)).close()} groups.")


def _print(group: FinishedGroup, form: Form) -> None:
    if form is Form.JSON:
        answer_json_line(_wire(group))
    else:
        rewards = [result.reward for result in group.results if result.reward is not None]
        label = f" [{group.label}]" if group.label else ""
        shown = number(mean(rewards), 3)
        out.print(f"{group.sequence}{label} {group.task}: {amount(len(group.results), 'rollout')}, mean reward {shown}")


def _wire(group: FinishedGroup) -> dict[str, Any]:
    return {
        "group": group.sequence,
        "task": group.task,
        "label": group.label,
        "results": [result.wire() for result in group.results],
    }
