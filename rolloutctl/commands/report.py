"""`rolloutctl report`: write a run as one HTML file."""

import asyncio
import contextlib
import itertools
import os
from pathlib import Path
from typing import Annotated

import typer

from agent_runtime.export.whole_file import whole_file
from agent_runtime.recording.segments import RecordCorrupt
from rolloutctl.errors import CommandError, Exit
from rolloutctl.runs import JobArgument, find_run_folder
from rolloutctl.ui.console import Form, amount, answer_json, err, named_file, say
from rolloutctl.viewer import export
from rolloutctl.viewer.library import OpenRun
from rolloutctl.viewer.rollout import Rollout


async def report(
    job: JobArgument,
    file: Annotated[
        str | None,
        typer.Option(
            "-o",
            metavar="FILE",
            help="File to write; named after the run when left out. `json` prints its path and size as JSON.",
        ),
    ] = None,
) -> None:
    """Write a run as one self-contained HTML file with figures, groups and all transcripts."""
    path, problems = await _report(job, named_file(file))
    size = path.stat().st_size
    if file == Form.JSON:
        answer_json({"path": str(path), "bytes": size})
    else:
        say(f"Wrote {path} ({size / 1e6:.1f} MB). Open it in a browser.")
    if problems:
        rollouts = amount(len(problems), "rollout")
        raise CommandError(f"{rollouts} cannot be read, and the report says so. {problems[0]}", code=Exit.STORAGE)


async def _report(reference: str, file: Path | None) -> tuple[Path, list[str]]:
    """Return the written file, and which objects are damaged."""
    run = OpenRun(await find_run_folder(reference, os.environ))
    path = file or Path(f"{run.run.folder}.html")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise CommandError(f"-o {path}: {problem}", hint="Name a file in an existing folder.")
    with err.status("Reading transcripts…"):
        async with contextlib.aclosing(run):
            return path, await write_report(run, path)


async def write_report(run: OpenRun, path: Path) -> list[str]:
    """Write a run as one HTML file, a group at a time. Return which objects are damaged; the file says so too."""
    problems: list[str] = []
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        await run.read()
        rows = run.table.rows(limit=len(run.table))
        file.write(export.head(run.summary(), rows))
        for number, members in itertools.groupby(rows, key=lambda row: int(row["group"])):
            indexes = [row["index"] for row in members]
            found = await asyncio.gather(*(_page(run, index) for index in indexes))
            problems += [rollout.problem for rollout in found if rollout.problem]
            file.write(export.group(number, dict(zip(indexes, found, strict=True))))
        file.write(export.tail())
    return [*run.table.damaged.values(), *problems]


async def _page(run: OpenRun, index: int) -> Rollout:
    try:
        return await run.rollout(index)
    except RecordCorrupt as error:
        return Rollout([], problem=str(error))
