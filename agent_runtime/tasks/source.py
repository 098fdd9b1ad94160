"""What a job's `tasks` stand for: the manifest's own, or those of a file or folder, read by its format."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agent_runtime.tasks import harbor, rows, swe_bench
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError
from rollout_api.tasks import TaskFormat, Tasks

READERS: Final[Mapping[TaskFormat, Callable[[SourcePlace], LoadedTasks]]] = {
    TaskFormat.ROWS: rows.read,
    TaskFormat.HARBOR: harbor.read,
    TaskFormat.SWE_BENCH: swe_bench.read,
}
"""A reader gives tasks of which each is valid, or raises TaskSourceError with every problem there is."""


def load_tasks(tasks: Tasks, base_dir: Path, environ: Mapping[str, str]) -> LoadedTasks:
    """The tasks of a job, in order.

    A relative `from.uri` starts at `base_dir`, the manifest's folder; object storage takes its credentials from `environ`.
    Raises TaskSourceError with every problem, and for `stream`, whose tasks are submitted while the job runs.
    """
    if tasks.inline is not None:
        return LoadedTasks(tasks.inline)
    if tasks.from_ is None:
        raise TaskSourceError(
            [TaskProblem("tasks.stream", None, "has no tasks to read; they are submitted to the job")]
        )
    return READERS[tasks.from_.format](SourcePlace(tasks.from_, base_dir, environ, tasks.image_template))
