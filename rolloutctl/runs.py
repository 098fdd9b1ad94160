"""Find the run that a command's argument `JOB` refers to: by name, manifest, folder or URI."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from agent_runtime.recording.health import health_reports
from agent_runtime.recording.job_record import is_copy, manifest_changes, output_uri, read_job_file
from agent_runtime.recording.reader import RunFolder, RunReader, find_folder
from agent_runtime.recording.store import Store, local_folder
from rollout_api.rollout_job import RolloutJob
from rolloutctl.completion import DEFAULT_OUTPUT, RUN_FOLDER, complete_run
from rolloutctl.errors import CommandError, did_you_mean
from rolloutctl.manifest import read_manifest
from rolloutctl.run_state import is_worked_on
from rolloutctl.ui.console import say

PATIENCE_SECONDS = 20
"""Time limit for storage in commands, where a user waits. A runner waits for minutes."""

RUN_HELP = "A run: a name in ./out, a manifest (its output.uri), or the folder or URI of a run."
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help=RUN_HELP, autocompletion=complete_run)]
NewestJobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help=f"{RUN_HELP} The newest run in ./out when left out.",
        show_default=False,
        autocompletion=complete_run,
    ),
]

WhereArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHERE",
        help="Folder or URI with runs. Or one run, a manifest or a job's name, to consider only its runs.",
        autocompletion=complete_run,
    ),
]


@dataclass(frozen=True)
class Place:
    """A storage location, and the name to look up in it: a run's folder, a job's name, or None for any run."""

    uri: str
    name: str | None
    job: RolloutJob | None = None


def place_of(reference: str | None) -> Place:
    """Resolve a reference to a run. Reads manifests but no storage. Raises CommandError."""
    if reference is None:
        return Place(DEFAULT_OUTPUT, None)
    path = Path(reference)
    if "://" in reference:
        return Place(reference.rstrip("/"), None)
    if path.is_dir():
        is_run = (path / "job.json").is_file()
        return Place(str(path.resolve().parent), path.resolve().name) if is_run else Place(reference, None)
    if path.is_file() or path.suffix in (".yaml", ".yml", ".json"):
        job = read_manifest(path)
        return Place(output_uri(job, path.resolve().parent), job.metadata.name, job)
    if "/" in reference:
        raise CommandError(f"{reference}: no such file or folder", hint=RUN_HELP)
    return Place(DEFAULT_OUTPUT, reference)


async def open_place(reference: str | None, environ: Mapping[str, str]) -> tuple[Store, Place]:
    """Open the storage of a reference, and return it with the name to look up. Raises CommandError, StorageError."""
    place = place_of(reference)
    store = open_existing(place.uri, environ)
    if place.name is None and await store.get("job.json") is not None:  # the URI of a run
        uri, _, folder = place.uri.rpartition("/")
        place = Place(uri, folder)
        store = open_existing(place.uri, environ)
    return store, place


async def find_run(reference: str | None, environ: Mapping[str, str] | None = None) -> RunReader:
    """Return the referenced run with its seals. Raises as `find_run_folder`, and RecordCorrupt."""
    return await RunReader.of(await find_run_folder(reference, environ))


async def find_run_folder(
    reference: str | None, environ: Mapping[str, str] | None = None, *, may_be_empty: bool = False
) -> RunFolder:
    """Return the folder of the referenced run. Of several, it is the newest one; unless it `may_be_empty`, a stopped run
    without a finished rollout is skipped if an older one has some. Raises CommandError that lists the existing runs,
    NoSuchRun and StorageError.
    """
    store, place = await open_place(reference, os.environ if environ is None else environ)
    run = await _find(store, place, is_named=reference is not None, may_be_empty=may_be_empty)
    if place.job is not None and (changed := manifest_changes(run.job_file, place.job)):
        lines = "".join(f"\n  {change}" for change in changed)
        say(f"{reference} differs from the manifest that {run.folder} ran with:{lines}", "yellow")
    return run


async def _find(store: Store, place: Place, *, is_named: bool, may_be_empty: bool) -> RunFolder:
    if place.name is not None and (RUN_FOLDER.fullmatch(place.name) or await read_job_file(store, place.name)):
        return await find_folder(store, place.name)
    folders = await _runs_by_job(store)
    if not folders:
        raise CommandError(f"{place.uri} contains no run", hint=RUN_HELP)
    if place.name is not None and place.name not in folders:
        raise CommandError(
            f"{place.uri} contains no run of {place.name!r}, only of {_shortened_list(sorted(folders))}."
            f"{did_you_mean(place.name, [*folders, *(folder for of_job in folders.values() for folder in of_job)])}"
        )
    if place.name is None and len(folders) > 1 and is_named:
        raise CommandError(
            f"{place.uri} contains runs of {_shortened_list(sorted(folders))}; name one of them", hint=RUN_HELP
        )
    wanted = [folder for job, of_job in folders.items() if place.name in (None, job) for folder in of_job]
    begun = [
        # A copy of a run in the same folder has the same age, and may be incomplete.
        (job_file.created, not is_copy(folder, job_file), folder, job_file.uid)
        for folder in wanted
        if (job_file := await read_job_file(store, folder))
    ]
    if not begun:  # all folders are rests of interrupted deletions
        raise CommandError(f"{place.uri} contains no run", hint=RUN_HELP)
    newest_first = [(folder, uid) for *_, folder, uid in sorted(begun, reverse=True)]
    found, _ = newest_first[0]
    if not may_be_empty:
        with_results = (folder for folder, uid in newest_first if not await _is_empty(store.below(folder), uid))
        found = await anext(with_results, found)
        say_skipped(newest_first[0][0], found)
    return await find_folder(store, found)


async def _is_empty(run: Store, uid: str) -> bool:
    """Return whether a run has no finished rollout, and no process works on it."""
    return "seals" not in await run.folders() and not is_worked_on(uid, await health_reports(run))


def say_skipped(newest: str, chosen: str) -> None:
    """Say that a command uses an older run than the newest one."""
    if chosen != newest:
        say(f"{newest} has no finished rollout and is not running; {chosen} is used instead.", "yellow")


async def _runs_by_job(store: Store) -> dict[str, list[str]]:
    """Return folders of runs by the names of their jobs. A renamed folder is identified by its `job.json`."""
    runs: dict[str, list[str]] = {}
    for folder in await store.folders():
        if found := RUN_FOLDER.fullmatch(folder):
            runs.setdefault(found["name"], []).append(folder)
        elif job_file := await read_job_file(store, folder):
            runs.setdefault(job_file.manifest["metadata"]["name"], []).append(folder)
    return runs


def _shortened_list(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def open_existing(uri: str, environ: Mapping[str, str]) -> Store:
    """Open storage for reading. A missing local folder is an error and is not created."""
    folder = local_folder(uri)
    if folder is not None and not folder.is_dir():
        raise CommandError(
            f"the folder {uri} does not exist", hint=f"Run a job first, or give the place of its runs. {RUN_HELP}"
        )
    return Store.open(uri, environ, patience_seconds=PATIENCE_SECONDS)
