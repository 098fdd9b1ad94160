"""Tasks of a table: every one known to be valid from the start, and made when it is asked for."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError
from agent_runtime.tasks.selection import ordered, row_filter
from agent_runtime.tasks.table import Row, RowError, Table
from rollout_api.tasks import Task

MakeTask = Callable[[Row], Task]
"""Raises RowError with all that is wrong with the row."""

NameIfSure = Callable[[Row], str | None]
"""The name of a row's task where the row alone shows that making it succeeds; None where that has to be tried."""


class TableTasks(Sequence[Task]):
    """Chosen rows of a table as tasks. What is kept is the table: a task is a function of its row."""

    def __init__(self, table: Table, positions: Sequence[int], make: MakeTask) -> None:
        self._table, self._positions, self._make = table, positions, make

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TableTasks": ...
    def __getitem__(self, index: int | slice) -> "Task | TableTasks":
        if isinstance(index, slice):
            return TableTasks(self._table, self._positions[index], self._make)
        return self._make(self._table.row(self._positions[index]))

    def __iter__(self) -> Iterator[Task]:
        for row in self._table.rows(self._positions):
            if isinstance(row, RowError):
                raise row
            yield self._make(row)


def tasks_of_table(
    place: SourcePlace,
    table: Table,
    make: MakeTask,
    warnings: Sequence[TaskProblem] = (),
    name_if_sure: NameIfSure = lambda row: None,
) -> LoadedTasks:
    """The rows that `filter`, `shuffleSeed` and `limit` choose, as tasks of which each is valid.

    Raises TaskSourceError with every problem there is, by line or row.
    """
    check_columns(place, table, [(column, "named in tasks.from.filter") for column in place.source.filter])
    problems: list[TaskProblem] = []
    if not len(table):
        expected = "one JSON object a line" if table.unit == "line" else "one task a row"
        problems = [TaskProblem(place.uri, None, f"has no tasks; expected {expected}")]
    positions = ordered(_passing(place, table, problems), place.source)
    lines: dict[str, int] = {}
    for position, row in zip(positions, table.rows(positions), strict=True):
        try:
            if isinstance(row, RowError):
                raise row
            name = name_if_sure(row) or make(row).name
            if name in lines:
                stands = f"stands in {table.unit} {lines[name]} already; names must differ"
                raise RowError([f"name: a task named {name!r} {stands}"])
            lines[name] = table.number(position)
        except RowError as error:
            problems += _problems(place, table, position, error)
    if problems:
        raise TaskSourceError(sorted(problems, key=lambda problem: problem.line or 0))
    return LoadedTasks(TableTasks(table, positions, make), warnings)


def check_columns(place: SourcePlace, table: Table, needed: Sequence[tuple[str, str]]) -> None:
    """Raise TaskSourceError for columns that the file does not have; each comes with what needs it."""
    known = table.columns
    if known is None:
        return
    problems = [
        TaskProblem(place.uri, None, f"has no column {column!r}, {why}; it has {', '.join(known)}")
        for column, why in needed
        if column not in known
    ]
    if problems:
        raise TaskSourceError(problems)


def _passing(place: SourcePlace, table: Table, problems: list[TaskProblem]) -> Sequence[int]:
    """The rows that the filter lets through. A row that cannot be read, and might have been one, is a problem."""
    everything, wanted = range(len(table)), place.source.filter
    if not wanted or problems:
        return everything
    passes, chosen, seen = row_filter(wanted), [], set[str]()
    for position, row in zip(everything, table.rows(everything), strict=True):
        if isinstance(row, RowError):
            problems += _problems(place, table, position, row)
            continue
        seen |= row.keys()
        if passes(row):
            chosen.append(position)
    if not problems and not chosen:
        if absent := [column for column in wanted if column not in seen and table.columns is None]:
            message = f"has no column {absent[0]!r}, named in tasks.from.filter; it has {', '.join(sorted(seen))}"
        else:
            message = f"none of its {len(table)} {table.unit}s passes tasks.from.filter; look at its values"
        problems.append(TaskProblem(place.uri, None, message))
    return chosen


def _problems(place: SourcePlace, table: Table, position: int, error: RowError) -> list[TaskProblem]:
    return [TaskProblem(place.uri, table.number(position), message, table.unit) for message in error.messages]
