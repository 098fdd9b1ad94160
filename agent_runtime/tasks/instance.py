"""Instances: rows that a format converts into tasks, and their problems."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks
from agent_runtime.tasks.table import Row, RowError, check_columns, json_list, open_table, tasks_of_table
from rollout_api.manifest import explain
from rollout_api.tasks import Task

Instance = Mapping[str, Any]


def read_instances(
    place: SourcePlace,
    required: Sequence[str],
    optional: Sequence[str],
    make: Callable[[Instance], Task],
    name_if_valid: Callable[[Instance], str | None] = lambda instance: None,
) -> LoadedTasks:
    """Return the tasks of a file of instances. `make` raises RowError; `name_if_valid` is as for `tasks_of_table`.

    Raises TaskSourceError with every invalid row, or only with the missing columns.
    """
    fields = (*required, *optional)
    if unknown := [field for field in place.source.columns if field not in fields]:
        raise place.refused(
            f"tasks.from.columns: {unknown[0]!r} is not a field of an instance; expected one of {', '.join(fields)}"
        )
    columns = {field: place.source.columns.get(field, field) for field in fields}
    table = open_table(place, {*columns.values(), *place.source.filter})
    needs = f"which format {place.source.format.value} needs; name the one that has it in tasks.from.columns"
    named = [(column, f"named in tasks.from.columns.{field}") for field, column in place.source.columns.items()]
    check_columns(place, table, [*named, *((field, needs) for field in required if columns[field] == field)])

    def instance(row: Row) -> Instance:
        return row | {field: row.get(column) for field, column in place.source.columns.items()}

    return tasks_of_table(
        place, table, lambda row: make(instance(row)), name_if_valid=lambda row: name_if_valid(instance(row))
    )


def valid(values: dict[str, Any]) -> Task:
    """Return the task with these fields. Raises RowError."""
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        raise row_error(error, values) from None


def row_error(error: ValidationError, values: dict[str, Any]) -> RowError:
    """Return an error with each problem of a task's fields."""
    return RowError([str(problem) for problem in explain(error, Task, values)])


class Checked:
    """The fields of an instance, and their problems."""

    def __init__(self, instance: Mapping[str, Any]) -> None:
        self._instance = instance
        self.messages: dict[str, str] = {}

    def wrong(self, field: str, message: str) -> None:
        """Record the first problem of a field."""
        self.messages.setdefault(field, message)

    def refuse(self) -> None:
        """Raise RowError if there were problems."""
        if self.messages:
            raise RowError([f"{field}: {message}" for field, message in self.messages.items()])

    def text(self, field: str) -> str:
        """Return a required text."""
        value = self._instance.get(field)
        if value is None or value == "":
            self.wrong(field, "is missing or empty")
        elif not isinstance(value, str):
            self.wrong(field, f"is {json.dumps(value, default=str)[:60]}, expected text")
        else:
            return value
        return ""

    def optional(self, field: str) -> str:
        """Return an optional text."""
        return self.text(field) if self._instance.get(field) not in (None, "") else ""

    def patch(self, field: str) -> str:
        """Return a patch in git's format, or an empty text."""
        patch = self.optional(field)
        if patch and not patch.startswith("diff --git ") and "\ndiff --git " not in patch:
            self.wrong(field, "is not a git patch: expected lines that begin with 'diff --git'")
        return patch if patch.endswith("\n") or not patch else f"{patch}\n"

    def names(self, field: str) -> list[str]:
        """Return a list of test names, or parse one from JSON."""
        value = json_list(self._instance.get(field))
        if not isinstance(value, list) or set(map(type, value)) - {str} or "" in value:
            found = "is missing" if value is None else f"is {json.dumps(value, default=str)[:60]}"
            self.wrong(field, f"{found}; expected a list of test names, or JSON text of one")
            return []
        return value
