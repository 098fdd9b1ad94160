"""`Rows`: tasks from a JSONL file, one a line."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError
from rollout_api.manifest import explain, path_of, validate
from rollout_api.tasks import Task

LINE_BYTES = 64 * 1024 * 1024
"""Longest line: a task has at most 256 + 1024 files of 200 KiB, and a file without line ends must not fill the memory."""


def read(place: SourcePlace) -> LoadedTasks:
    """The tasks of a file. Raises TaskSourceError with every broken line."""
    return LoadedTasks(read_rows(place.chunks(), place.uri, place.source.limit))


def read_rows(chunks: Iterator[bytes], source: str, limit: int | None = None) -> list[Task]:
    """Tasks from the bytes of a JSONL file: one task a line, as in a manifest; empty lines are skipped.

    Raises TaskSourceError with every broken line among those that `limit` lets through.
    """
    tasks: dict[str, tuple[Task, int]] = {}
    problems: list[TaskProblem] = []
    rows = 0
    for number, line in _lines(chunks, source):
        if not line.strip():
            continue
        if limit is not None and rows == limit:
            break
        rows += 1
        task, messages = _row(line)
        if task is not None and task.name in tasks:
            messages = [
                f"name: a task named {task.name!r} stands in line {tasks[task.name][1]} already; names must differ"
            ]
        elif task is not None:
            tasks[task.name] = (task, number)
        problems += [TaskProblem(source, number, message) for message in messages]
    if not rows:
        problems.append(TaskProblem(source, None, "has no tasks; expected one JSON object a line"))
    if problems:
        raise TaskSourceError(problems)
    return [task for task, _ in tasks.values()]


def _row(line: bytes) -> tuple[Task | None, list[str]]:
    """The task of a line, or what is wrong with it."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(items)

    try:
        value = json.loads(line, object_pairs_hook=pairs, parse_constant=_no_constant)
        if not isinstance(value, dict):
            return None, ["expected a JSON object with at least name and prompt"]
        if repeated:
            return None, [f"{name}: is given twice; keep one of them" for name in repeated]
        return validate(Task, value), []
    except ValidationError as error:
        return None, [
            f"{path_of(place)}: {message}".removeprefix(": ") for place, message in explain(error, Task, value)
        ]
    except UnicodeError as error:
        return None, [f"is not UTF-8 text: {error.reason if isinstance(error, UnicodeDecodeError) else error}"]
    except RecursionError:
        return None, ["is nested too deeply"]
    except ValueError as error:
        return None, [f"is not JSON: {error}"]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _lines(chunks: Iterator[bytes], source: str) -> Iterator[tuple[int, bytes]]:
    number, rest = 1, b""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield number, line
            number += 1
        if len(rest) > LINE_BYTES:
            message = f"is longer than {LINE_BYTES} bytes; expected one task a line"
            raise TaskSourceError([TaskProblem(source, number, message)])
    yield number, rest
