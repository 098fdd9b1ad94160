"""Task sources: the tasks for a job's `tasks`."""

from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError, TaskSourceUnavailable
from agent_runtime.tasks.rows import read_rows
from agent_runtime.tasks.source import load_tasks

__all__ = ["LoadedTasks", "TaskProblem", "TaskSourceError", "TaskSourceUnavailable", "load_tasks", "read_rows"]
