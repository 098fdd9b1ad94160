"""Completions for the shell: names of runs, rollouts and tasks. They read files of this machine only, and never fail."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

DEFAULT_OUTPUT: Final = "out"
"""Folder in which runs are looked up by name. `rolloutctl init` writes it into its manifest."""

RUN_FOLDER: Final = re.compile(r"(?P<name>.+)-[0-9a-f]{8}")
"""`<job name>-<first 8 characters of the run's uid>`, as defined in docs/recording.md."""

MOST: Final = 1000
"""Most names that are read, because a person waits for them."""


def complete_run(incomplete: str) -> list[str]:
    """Return names of jobs, and of folders with a run, in ./out."""
    folders = sorted(path.parent.name for path in itertools.islice(Path(DEFAULT_OUTPUT).glob("*/job.json"), MOST))
    jobs = sorted({found["name"] for folder in folders if (found := RUN_FOLDER.fullmatch(folder))})
    return [name for name in [*jobs, *folders] if name.startswith(incomplete)]


def complete_rollout(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return TASK/MEMBER of the rollouts of the run that the command line names."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        run = _folder(str(ctx.params.get("job")))
        spec: dict[str, Any] = json.loads((run / "job.json").read_bytes())["manifest"]["spec"]
        names = [f"{task}/{member}" for task in _tasks_of(run, spec) for member in range(spec.get("groupSize", 1))]
    return [name for name in names if name.startswith(incomplete)]


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the manifest's own tasks."""
    names: list[str] = []
    with contextlib.suppress(Exception):
        from rollout_api.manifest import load_manifest

        # The option that is being completed has no value yet, so the parser has left the manifest among the arguments.
        path = ctx.params.get("manifest") or next(word for word in ctx.args if not word.startswith("-"))

        names = [task.name for task in load_manifest(Path(path)).spec.tasks.inline or []]
    return [name for name in names if name.startswith(incomplete)]


def _folder(reference: str) -> Path:
    """Return the folder of a run; the newest one of a job. Raises LookupError."""
    for folder in (Path(reference), Path(DEFAULT_OUTPUT, reference)):
        if (folder / "job.json").is_file():
            return folder
    found = [
        path.parent
        for path in Path(DEFAULT_OUTPUT).glob("*/job.json")
        if (match := RUN_FOLDER.fullmatch(path.parent.name)) and match["name"] == reference
    ]
    if not found:
        raise LookupError(reference)
    return max(found, key=lambda folder: (folder / "job.json").stat().st_mtime)


def _tasks_of(run: Path, spec: dict[str, Any]) -> Iterator[str]:
    if inline := spec["tasks"].get("inline"):
        yield from (task["name"] for task in inline)
        return
    with (run / "results.jsonl").open("rb") as lines:
        yield from dict.fromkeys(json.loads(line)["task"] for line in itertools.islice(lines, MOST))
