"""`rolloutctl export`: convert a run for other programs."""

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

_NOT_JSON = ", such as ./json: `-o json` means JSON on standard output"


async def export(
    job: JobArgument,
    form: Annotated[Format, typer.Option("--format", help="Format of the export; docs/exports.md describes each.")],
    output: Annotated[
        str | None,
        typer.Option("-o", metavar="FILE", help="File or folder to write; standard output when left out, or `json`."),
    ] = None,
) -> None:
    """Write the finished rollouts of a run as JSON lines, a Parquet file or a folder, depending on the format."""
    file, needed = named_file(output), ""
    if form in FOLDERS:
        needed = "writes a folder; name a new one"
    elif form in FILES:
        needed = "writes a Parquet file; name the file"
    if needed and file is None:
        raise CommandError(f"--format {form.value} {needed} with -o{_NOT_JSON if output else ''}")
    count = await _export(job, form, file)
    pieces = {Format.HARBOR: "trials", Format.REAL_WORK: "trajectories"}.get(form, "rows" if form in FILES else "lines")
    say(f"{count} {pieces}{f' in {file}' if file else ''}")


async def _export(reference: str, form: Format, file: Path | None) -> int:
    run = await find_run(reference, os.environ)
    if file is None:
        return await _write_lines(run, form, answer_stream().buffer)
    if form in FILES:
        return await FILES[form](run, file)
    if form in FOLDERS:
        try:
            return await FOLDERS[form](run, file)
        except FileExistsError as error:
            raise CommandError(f"{error.filename} exists already; name a new folder with -o") from error
    with whole_file(file) as partial, partial.open("wb") as target:
        return await _write_lines(run, form, target)


async def _write_lines(run: RunReader, form: Format, target: BinaryIO) -> int:
    count = 0
    async for line in lines_of(run, form):
        target.write(line)
        count += 1
    target.flush()
    return count
