"""`rolloutctl export`: convert a run for other programs."""

import os
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from agent_runtime.export.formats import FILES, FOLDERS, Format
from agent_runtime.export.formats import export as lines_of
from agent_runtime.export.whole_file import whole_file
from agent_runtime.recording.reader import RunReader
from rolloutctl.errors import CommandError, Exit
from rolloutctl.runs import JobArgument, find_run
from rolloutctl.ui.console import answer_stream, named_file, say

_NO_TOKENS = "no rollout has token ids (docs/token-exact.md says which model servers return them)"
_NO_TURNS = "no rollout called a model"
_WHY_EMPTY = {
    Format.TOKENS: _NO_TOKENS,
    Format.VERL_TOKENS: _NO_TOKENS,
    Format.PROGRAM_ATIF: "no rollout's program wrote a trajectory file (agent.trajectory)",
    Format.SWE_BENCH: "no rollout is Completed",
}
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
    if not run.seals:
        raise CommandError(f"{run.folder} has no finished rollout yet", code=Exit.FAILED)
    if file is None:
        return _not_empty(await _write_lines(run, form, answer_stream().buffer), form)
    if form in FOLDERS:
        try:
            return await FOLDERS[form](run, file)
        except FileExistsError as error:
            raise CommandError(f"{error.filename} exists already; name a new folder with -o") from error
    with whole_file(file) as partial:  # an empty export does not replace the file of an earlier one
        if form in FILES:
            return _not_empty(await FILES[form](run, partial), form)
        with partial.open("wb") as target:
            return _not_empty(await _write_lines(run, form, target), form)


def _not_empty(count: int, form: Format) -> int:
    """Raise CommandError with the reason if an export of finished rollouts has nothing."""
    if count == 0:
        raise CommandError(f"nothing was exported: {_WHY_EMPTY.get(form, _NO_TURNS)}", code=Exit.FAILED)
    return count


async def _write_lines(run: RunReader, form: Format, target: BinaryIO) -> int:
    count = 0
    async for line in lines_of(run, form):
        target.write(line)
        count += 1
    target.flush()
    return count
