"""`Rows`: each row of a JSONL or Parquet file is a task. Its columns are the fields of a task, or are mapped to them."""

import difflib
import json
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from agent_runtime.tasks.instance import row_error
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError
from agent_runtime.tasks.table import JsonLines, Row, RowError, check_columns, json_list, open_table, tasks_of_table
from rollout_api.manifest import validate
from rollout_api.tasks import Task, TaskSource

FIELDS = {info.alias or name for name, info in Task.model_fields.items()}


def read(place: SourcePlace) -> LoadedTasks:
    """Return the tasks of a file. Raises TaskSourceError with every invalid row.

    Without `columns` every column must be a field of a task, or in `filter`. With it the others are ignored, and a
    warning names them.
    """
    columns = place.source.columns
    only_filter = place.source.filter.keys() - FIELDS
    _refuse_unknown_fields(place, columns)
    wanted = FIELDS | set(columns.values()) | set(place.source.filter) if columns else None
    table = open_table(place, wanted)
    check_columns(place, table, [(column, f"named in tasks.from.columns.{field}") for field, column in columns.items()])
    unused = [name for name in table.columns or () if wanted is not None and name not in wanted]
    message = f"columns {', '.join(unused)} are not used; tasks.from.columns names none of them"
    warnings = [TaskProblem(place.uri, None, message)] if unused else []

    def make(row: Row) -> Task:
        return _task(mapped(row, columns) if columns else {n: v for n, v in row.items() if n not in only_filter})

    return tasks_of_table(place, table, make, warnings)


def read_rows(chunks: Iterator[bytes], source: str, limit: int | None = None) -> list[Task]:
    """Parse tasks from the bytes of a JSONL file: one task per line, as in a manifest; empty lines are skipped.

    Raises TaskSourceError with every invalid line among the first `limit`.
    """
    place = SourcePlace(TaskSource(uri=source, limit=limit), Path(), {})
    return list(tasks_of_table(place, JsonLines(chunks, source, limit), _task).tasks)


def _task(values: Row) -> Task:
    """Return a task from its fields, by the rules of the manifest. Raises RowError."""
    try:
        return validate(Task, values)
    except ValidationError as error:
        raise row_error(error, values) from None
    except (TypeError, ValueError) as error:  # a type that JSON lacks, such as a time in Parquet
        raise RowError([f"has a value of an unsupported type: {error}"]) from None


def mapped(row: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """Return the fields of a task from a row of other columns. Raises RowError.

    A field gets the value of its column. Three kinds of values are converted, because tables often have them: a number
    for a text, one text for a list of texts, and JSON text for any list or mapping.
    """
    task: Row = {name: row[name] for name in FIELDS & row.keys() if name not in columns}
    problems = []
    for field, column in columns.items():
        if column not in row:
            problems.append(f"{field}: column {column!r} is missing or empty")
            continue
        try:
            _put(task, field.split("."), _adapted(row[column], _kind(field)))
        except ValueError as error:
            problems.append(f"{field}: column {column!r} {error}")
    if problems:
        raise RowError(problems)
    return task


def _put(values: Row, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ValueError(f"cannot be set: {name} already has another value")
    values[path[-1]] = value


Kind = Literal["text", "texts", "other"]


def _adapted(value: Any, kind: Kind) -> Any:
    if kind == "text":
        return json.dumps(value) if isinstance(value, int | float) else value
    if kind == "texts":
        listed = json_list(value)
        return [listed] if isinstance(listed, str) else listed
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is text that is not JSON: {error}") from None


def _refuse_unknown_fields(place: SourcePlace, columns: Mapping[str, str]) -> None:
    problems = []
    for field in columns:
        try:
            _kind(field)
        except KeyError as error:
            (unknown, known) = error.args
            near = difflib.get_close_matches(unknown, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known))}"
            message = f"tasks.from.columns: {field!r} is not a field of a task; {hint}"
            problems.append(TaskProblem(place.uri, None, message))
    if problems:
        raise TaskSourceError(problems)


@cache
def _kind(field: str) -> Kind:
    """Return the type of a field, such as `sandbox.image`. Raises KeyError with the unknown name and the existing ones."""
    annotation: Any = Task
    for name in field.split("."):
        model = _plain(annotation)
        fields = {info.alias or key: info.annotation for key, info in getattr(model, "model_fields", {}).items()}
        if name not in fields:
            raise KeyError(name, list(fields))
        annotation = fields[name]
    plain = _plain(annotation)
    if get_origin(plain) is list:
        return "texts" if _plain(get_args(plain)[0]) is str else "other"
    return "text" if isinstance(plain, type) and issubclass(plain, str) else "other"


def _plain(annotation: Any) -> Any:
    """Return a type without its bounds and without None."""
    if hasattr(annotation, "__metadata__"):
        return _plain(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return next(_plain(member) for member in get_args(annotation) if member is not type(None))
    return annotation
