"""Loads a job's `tasks`: the manifest's own, or those of a file or folder in its format."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from agent_runtime.tasks import harbor, r2e, rows, swe_bench, terminal_bench
from agent_runtime.tasks.folders import Build, FolderFormat, read_folders
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError, without_verifier
from rollout_api.environments import TaskEnvironment
from rollout_api.tasks import EnvironmentGroups, Task, TaskFormat, Tasks

FOLDERS: Final[Mapping[TaskFormat, FolderFormat]] = {
    TaskFormat.HARBOR: harbor.FORMAT,
    TaskFormat.TERMINAL_BENCH: terminal_bench.FORMAT,
}
"""Formats whose tasks are folders, which may have a Dockerfile."""

FILES: Final[Mapping[TaskFormat, Callable[[SourcePlace], LoadedTasks]]] = {
    TaskFormat.ROWS: rows.read,
    TaskFormat.SWE_BENCH: swe_bench.read,
    TaskFormat.R2E: r2e.read,
}
"""Formats of files. A reader returns valid tasks, or raises TaskSourceError with all problems."""


def needed_images(tasks: Tasks, base_dir: Path, environ: Mapping[str, str]) -> list[Build]:
    """Return the images of the tasks' Dockerfiles, each once. Raises TaskSourceError as `load_tasks` does."""
    source = tasks.from_
    if source is None or source.format not in FOLDERS:
        return []
    place = SourcePlace(source, base_dir, environ, tasks.image_template, tasks.dockerfiles)
    _, builds = read_folders(place, FOLDERS[source.format])
    return list({build.image: build for build in builds}.values())


def load_tasks(tasks: Tasks, base_dir: Path, environ: Mapping[str, str]) -> LoadedTasks:
    """Return the tasks of a job, in order.

    A relative `from.uri` starts at `base_dir`, the manifest's folder; `environ` has the credentials of object storage.
    Raises TaskSourceError with all problems, and for `stream`, whose tasks are submitted while the job runs.
    """
    if tasks.inline is not None:
        ungraded = [task.name for task in tasks.inline if not task.is_graded]
        return LoadedTasks(tasks.inline, without_verifier("spec.tasks.inline", ungraded, len(tasks.inline)))
    if tasks.environments is not None:
        return LoadedTasks([task for entry in tasks.environments for task in _environment_tasks(entry)])
    if tasks.branch is not None:
        message = "has no tasks to list; a job with tasks.branch uses the tasks of the branched rollouts"
        raise TaskSourceError([TaskProblem("tasks.branch", None, message)])
    if tasks.from_ is None:
        message = "has no tasks to list; tasks are submitted to the job while it runs"
        raise TaskSourceError([TaskProblem("tasks.stream", None, message)])
    place = SourcePlace(tasks.from_, base_dir, environ, tasks.image_template, tasks.dockerfiles)
    form = tasks.from_.format
    return read_folders(place, FOLDERS[form])[0] if form in FOLDERS else FILES[form](place)


def _environment_tasks(entry: EnvironmentGroups) -> Iterator[Task]:
    """Return one task for each group, `TAG-0`, `TAG-1` and so on; each has a seed, which all members of its group
    share.
    """
    for group in range(entry.groups):
        yield Task(
            name=f"{entry.label}-{group}",
            prompt=entry.prompt,
            tags=[entry.label],
            timeouts=entry.timeouts,
            environment=TaskEnvironment(
                id=entry.id,
                seed=entry.seed + group,
                max_steps=entry.max_steps,
                format_penalty=entry.format_penalty,
                config=entry.config,
                run_in=entry.run_in,
            ),
        )
