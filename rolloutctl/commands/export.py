"""`rolloutctl export`: a run as other programs read it."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from agent_runtime.export.formats import FILES, FOLDERS, Format
from agent_runtime.export.formats import export as lines_of
from agent_runtime.export.whole_file import whole_file
from agent_runtime.recording.reader import RunReader
from rolloutctl.errors import CommandError
from rolloutctl.runs import JobArgument, find_run
from rolloutctl.ui.console import answer_stream, named_file, say

_NOT_JSON = ", such as ./json: plain json asks for JSON on standard output"


def export(
    job: JobArgument,
    form: Annotated[Format, typer.Option("--format", help="Who is to read it; docs/exports.md describes each.")],
    output: Annotated[
        str | None,
        typer.Option("-o", metavar="FILE", help="File or folder to write; standard output when left out, or `json`."),
    ] = None,
) -> None:
    """Write the finished rollouts of a run as JSON lines, as a Parquet file, or as a folder -o."""
    file = named_file(output)
    if form in FOLDERS:
        if file is None:
            raise CommandError(
                f"--format {form.value} writes a folder; name a new one with -o{_NOT_JSON if output else ''}"
            )
        count = asyncio.run(_export_folder(job, form, file))
        say(f"{count} {'trials' if form is Format.HARBOR else 'trajectories'} in {file}")
        return
    if form in FILES:
        if file is None:
            raise CommandError(
                f"--format {form.value} writes a Parquet file; name it with -o{_NOT_JSON if output else ''}"
            )
        count = asyncio.run(_export_file(job, form, file))
        say(f"{count} rows in {file}")
        return
    count = asyncio.run(_export(job, form, file))
    say(f"{count} lines{f' in {file}' if file else ''}")


async def _export_folder(reference: str, form: Format, folder: Path) -> int:
    run = await find_run(reference, os.environ)
    try:
        return await FOLDERS[form](run, folder)
    except FileExistsError as error:
        raise CommandError(f"{error.filename} is there already; name a new folder with -o") from error


async def _export_file(reference: str, form: Format, file: Path) -> int:
    return await FILES[form](await find_run(reference, os.environ), file)


async def _export(reference: str, form: Format, file: Path | None) -> int:
    run = await find_run(reference, os.environ)
    if file is None:
        return await _write_lines(run, form, answer_stream().buffer)
    with whole_file(file) as partial, partial.open("wb") as target:
        return await _write_lines(run, form, target)


async def _write_lines(run: RunReader, form: Format, target: BinaryIO) -> int:
    count = 0
    async for line in lines_of(run, form):
        target.write(line)
        count += 1
    target.flush()
    return count
