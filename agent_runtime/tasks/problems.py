"""Result of reading a task source: tasks, and problems by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_api.tasks import Task

PROBLEMS_SHOWN = 100
"""Limit of problems in an error message; a file in the wrong format has one for each row."""


@dataclass(frozen=True)
class TaskProblem:
    """One problem of a task source, or an unsupported setting."""

    source: str
    line: int | None
    """Counted from 1; None for the source as a whole."""
    message: str
    unit: Literal["line", "row"] = "line"
    """Unit of `line`: Parquet has rows."""

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.source}: {self.message}"
        place = f"{self.source}:{self.line}" if self.unit == "line" else f"{self.source}, row {self.line}"
        return f"{place}: {self.message}"


class TaskSourceError(ValueError):
    """Tasks that cannot be used; `problems` has all problems, by line."""

    def __init__(self, problems: Sequence[TaskProblem]) -> None:
        self.problems = list(problems)
        shown = [str(problem) for problem in self.problems[:PROBLEMS_SHOWN]]
        if len(self.problems) > PROBLEMS_SHOWN:
            shown.append(f"… and {len(self.problems) - PROBLEMS_SHOWN} more problems")
        super().__init__("\n".join(shown))


class TaskSourceUnavailable(TaskSourceError):
    """The tasks cannot be read, for example while storage is unavailable or refuses; a later attempt may succeed."""


@dataclass(frozen=True)
class LoadedTasks:
    """The validated tasks of a source, in order; some sources create them on access."""

    tasks: Sequence[Task]
    warnings: Sequence[TaskProblem] = ()
    """Settings in the source that are not supported, and tasks without a verifier."""


NAMES_SHOWN = 5


def left_out(source: str, problems: Sequence[Sequence[TaskProblem]], total: int) -> list[TaskProblem]:
    """Return a warning about the tasks with these problems, which `tasks.from.skipUnusable` leaves out; empty if there are
    none. Raises TaskSourceError with all problems if no other task is left.
    """
    if not problems:
        return []
    if len(problems) == total:
        raise TaskSourceError([problem for of_task in problems for problem in of_task])
    shown = "; ".join(str(of_task[0]) for of_task in problems[:NAMES_SHOWN])
    more = "; …; validate shows all without skipUnusable" if len(problems) > NAMES_SHOWN else ""
    message = f"{len(problems)} of {total} tasks cannot be used and are left out (tasks.from.skipUnusable): "
    return [TaskProblem(source, None, f"{message}{shown}{more}")]


def without_verifier(source: str, names: Sequence[str], total: int) -> list[TaskProblem]:
    """Return a warning that names the tasks without a verifier; empty if there are none."""
    if not names:
        return []
    shown = _shown(names)
    have = "has no verifier" if len(names) == 1 else "have no verifier"
    return [TaskProblem(source, None, f"{len(names)} of {total} tasks {have}, so rollouts get no reward: {shown}")]


def with_new_services(names: Sequence[str]) -> list[TaskProblem]:
    """Return a warning that names the tasks whose services start anew for the grading; empty if there are none."""
    if not names:
        return []
    message = (
        f"mode Separate grades with new services, so what agents changed in services is not graded: {_shown(names)}; "
        "use mode Shared if it should be"
    )
    return [TaskProblem("spec.verifier.mode", None, message)]


def with_other_base(services: Sequence[str]) -> list[TaskProblem]:
    """Return a warning that names services with another base image than their tasks; empty if there are none."""
    if not services:
        return []
    message = (
        f"cannot run in a cluster, where a service has the base image of its task: {_shown(services)}; give both the same "
        "one in tasks.dockerfiles.bases"
    )
    return [TaskProblem("services", None, message)]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
