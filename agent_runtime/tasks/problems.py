"""What reading a task source comes to: tasks, and what is wrong with them, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_api.tasks import Task

PROBLEMS_SHOWN = 100
"""Most problems that one error tells of; a file in the wrong form has as many as it has rows."""


@dataclass(frozen=True)
class TaskProblem:
    """One thing that is wrong with a task source, or that is not honoured."""

    source: str
    line: int | None
    """From 1; None for the source as a whole."""
    message: str
    unit: Literal["line", "row"] = "line"
    """What `line` counts: Parquet has rows."""

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.source}: {self.message}"
        place = f"{self.source}:{self.line}" if self.unit == "line" else f"{self.source}, row {self.line}"
        return f"{place}: {self.message}"


class TaskSourceError(ValueError):
    """Tasks that cannot be used; `problems` has all that is wrong with them, line by line."""

    def __init__(self, problems: Sequence[TaskProblem]) -> None:
        self.problems = list(problems)
        shown = [str(problem) for problem in self.problems[:PROBLEMS_SHOWN]]
        if len(self.problems) > PROBLEMS_SHOWN:
            shown.append(f"… and {len(self.problems) - PROBLEMS_SHOWN} more problems")
        super().__init__("\n".join(shown))


class TaskSourceUnavailable(TaskSourceError):
    """The tasks cannot be read, as while storage is away or refuses; a later try may succeed."""


@dataclass(frozen=True)
class LoadedTasks:
    """The tasks of a source, in order; each was validated, and some sources make them only when they are asked for."""

    tasks: Sequence[Task]
    warnings: Sequence[TaskProblem] = ()
    """What stands in the source and is not honoured."""
