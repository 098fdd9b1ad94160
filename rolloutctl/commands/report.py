"""`rolloutctl report`: write a run as one HTML file."""

import asyncio
import itertools
import os
from pathlib import Path
from typing import Annotated

import typer

from agent_runtime.export.whole_file import whole_file
from agent_runtime.recording.job_record import read_abort
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Seal
from rolloutctl.errors import CommandError
from rolloutctl.runs import JobArgument, find_run
from rolloutctl.ui import page
from rolloutctl.ui.console import Form, answer_json, err, named_file, say


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
    path = await _report(job, named_file(file))
    size = path.stat().st_size
    if file == Form.JSON:
        answer_json({"path": str(path), "bytes": size})
    else:
        say(f"Wrote {path} ({size / 1e6:.1f} MB). Open it in a browser.")


async def _report(reference: str, file: Path | None) -> Path:
    run = await find_run(reference, os.environ)
    path = file or Path(f"{run.folder}.html")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise CommandError(f"-o {path}: {problem}", hint="Name a file in an existing folder.")
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as html, err.status("Reading transcripts…"):
        aborted = await read_abort(run.store)
        html.write(page.head(_facts(run, aborted["message"] if aborted else None), run.results()))
        for _, members in itertools.groupby(run.seals.values(), key=lambda seal: seal.result.group):
            html.write(page.group(await asyncio.gather(*(_rollout(run, seal) for seal in members))))
        html.write(page.tail())
    return path


async def _rollout(run: RunReader, seal: Seal) -> page.Rollout:
    return page.Rollout(seal.result, await run.records(seal.result.index), seal.verdict)


def _facts(run: RunReader, aborted: str | None) -> page.JobFacts:
    spec = run.job.spec
    return page.JobFacts(
        name=run.job.metadata.name,
        location=run.store.uri,
        mode=spec.mode.value,
        model=_model_name(run),
        agent=spec.agent.type,
        group_size=spec.group_size,
        total=run.total if run.total is not None else len(run.seals),
        aborted=aborted,
    )


def _model_name(run: RunReader) -> str:
    model = run.job.spec.model
    if model is None:
        return ""
    if model.endpoint is not None:
        return model.endpoint.name
    if model.server is not None:
        return model.server.model.name
    return model.server_ref or model.function or "scripted"
