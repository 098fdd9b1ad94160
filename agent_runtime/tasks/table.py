"""Rows of a JSONL or Parquet file, and tasks from them, which are parsed and created on access. A table keeps the
file's bytes, because parsed rows need several times as much memory.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import translate
from itertools import islice
from typing import Any, Literal, Protocol, overload

from pydantic_core import from_json

from agent_runtime.extensions import nearest
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import (
    NAMES_SHOWN,
    LoadedTasks,
    TaskProblem,
    TaskSourceError,
    left_out,
    without_verifier,
)
from rollout_api.tasks import Task, TaskSource

Row = dict[str, Any]


def json_list(value: Any) -> Any:
    """Return the list that a cell's JSON text has, because many tables have lists only as text; other values unchanged."""
    try:
        listed = from_json(value, cache_strings=False) if isinstance(value, str) else value
    except ValueError:
        return value
    return listed if isinstance(listed, list) else value


LINE_BYTES = 64 * 1024 * 1024
"""Longest line: a task has at most 256 + 1024 files of 200 KiB. The limit keeps a file without line ends from filling
the memory.
"""

_MOST_COMPARED = 10_000
"""Values of a column with which a value of the filter that matched nothing is compared: about 0.1 s."""

PARQUET_BATCH = 256
"""Rows that are decoded, and later converted to Python objects, at once."""


class RowError(ValueError):
    """An invalid row; `messages` lists all its problems."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("; ".join(messages))
        self.messages = list(messages)


class Table(Protocol):
    """Rows by position."""

    unit: Literal["line", "row"]
    columns: Collection[str] | None
    """Names of the columns in the file; None if rows may have different ones."""

    def __len__(self) -> int: ...

    def number(self, position: int) -> int:
        """Return the number of a row for users: its line, or its position from 1."""

    def row(self, position: int) -> Row:
        """Return the values of one row. Raises RowError."""

    def rows(self, positions: Sequence[int]) -> Iterator[Row | RowError]:
        """Return the values of many rows, in the given order."""


OTHER_TABLES = (".csv", ".tsv", ".xls", ".xlsx", ".yaml", ".yml")
"""Ends of names of files that have tasks in another format."""


def open_table(place: SourcePlace, wanted: Collection[str] | None = None) -> Table:
    """Return the rows of a source. `wanted` are the only needed columns; None for all.

    Raises TaskSourceError if the file as a whole cannot be read.
    """
    if place.is_parquet:
        return ParquetTable(place, wanted)
    if place.uri.lower().endswith(OTHER_TABLES):
        raise place.unreadable(
            "expected JSONL or Parquet; convert the file, for example with pandas' to_json(lines=True)"
        )
    only_first = not (place.source.filter or place.source.skip_unusable) and place.source.shuffle_seed is None
    return JsonLines(place.chunks(), place.uri, place.source.limit if only_first else None)


class JsonLines:
    """One JSON object per line; empty lines are skipped. Lines after the first `limit` are ignored."""

    unit: Literal["line", "row"] = "line"
    columns: Collection[str] | None = None

    def __init__(self, chunks: Iterator[bytes], source: str, limit: int | None = None) -> None:
        self._lines: list[bytes] = []
        self._numbers: list[int] = []
        for number, line in _lines(chunks, source):
            if limit is not None and len(self._lines) == limit:
                break
            if line.strip():
                self._lines.append(line)
                self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._lines)

    def number(self, position: int) -> int:
        return self._numbers[position]

    def row(self, position: int) -> Row:
        return _object(self._lines[position])

    def rows(self, positions: Sequence[int]) -> Iterator[Row | RowError]:
        for position in positions:
            try:
                yield self.row(position)
            except RowError as error:
                yield error


def _lines(chunks: Iterator[bytes], source: str) -> Iterator[tuple[int, bytes]]:
    number, rest = 1, b""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield number, line
            number += 1
        if len(rest) > LINE_BYTES:
            message = f"is longer than {LINE_BYTES} bytes; expected one task per line"
            raise TaskSourceError([TaskProblem(source, number, message)])
    yield number, rest


def _object(line: bytes) -> Row:
    """Parse the JSON object of a line. Raises RowError."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            names = [name for name, _ in items]
            repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return found

    try:
        value = json.loads(line, object_pairs_hook=pairs, parse_constant=_no_constant)
    except UnicodeError as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error
        raise RowError([f"is not UTF-8 text: {reason}"]) from None
    except RecursionError:
        raise RowError(["is nested too deeply"]) from None
    except ValueError as error:
        raise RowError([f"is not JSON: {error}"]) from None
    if not isinstance(value, dict):
        hint = "; write one object per line, without a list around them" if isinstance(value, list) else ""
        raise RowError([f"expected a JSON object with at least name and prompt{hint}"])
    if repeated:
        raise RowError([f"{name}: is given twice; keep one of them" for name in repeated])
    if rb"\ud" in line.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start]).strip("'")
            raise RowError([f"has {found}, an unpaired surrogate, which text cannot contain"]) from None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


class ParquetTable:
    """A Parquet file in Arrow's memory. Null values count as missing."""

    unit: Literal["line", "row"] = "row"

    def __init__(self, place: SourcePlace, wanted: Collection[str] | None) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise place.refused("Parquet needs pyarrow; install agent-rollouts[parquet]") from error
        with place.open() as file, place.readable():
            try:
                # Pass the path of a local file, so that pyarrow reads it without the interpreter.
                opened = parquet.ParquetFile(place.local_path or file)
                self.columns: Collection[str] | None = opened.schema_arrow.names
                kept = [name for name in opened.schema_arrow.names if wanted is None or name in wanted]
                # In batches, so that only a part of the encoded columns is in memory at once.
                batches = list(opened.iter_batches(PARQUET_BATCH, columns=kept))
                self._table = pyarrow.Table.from_batches(batches) if batches else opened.read(columns=kept)
                self._may_have_nulls = any(
                    column.null_count or pyarrow.types.is_nested(column.type) for column in self._table.columns
                )
            except (pyarrow.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())[:300]
                raise place.unreadable(f"it is not a readable Parquet file ({reason})") from error
            except (TypeError, NotImplementedError) as error:
                raise place.unreadable(f"pyarrow cannot read it ({error})") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def number(self, position: int) -> int:
        return position + 1

    def row(self, position: int) -> Row:
        (row,) = self._table.slice(position, 1).to_pylist()
        return _without_nulls(row)

    def rows(self, positions: Sequence[int]) -> Iterator[Row | RowError]:
        in_order = list(positions) == list(range(len(positions)))
        for start in range(0, len(positions), PARQUET_BATCH):
            some = positions[start : start + PARQUET_BATCH]
            part = self._table.slice(start, len(some)) if in_order else self._table.take(some)
            for row in part.to_pylist():
                yield _without_nulls(row) if self._may_have_nulls else row


def _without_nulls(row: Row) -> Row:
    """Remove nulls: a column that only some rows have is null in all others, and so are the fields of a struct."""
    return {
        name: _without_nulls(value)
        if isinstance(value, dict)
        else [_without_nulls(item) if isinstance(item, dict) else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in row.items()
        if value is not None
    }


class RowFilter:
    """Checks rows against `tasks.from.filter`: they need one of the values in every named column; for a list, one matching
    entry suffices. Knows which values matched nothing, because a misspelt one leaves its task out.
    """

    def __init__(self, wanted: Mapping[str, Sequence[str]]) -> None:
        self._patterns = {
            column: re.compile("|".join(translate(value) for value in values)) for column, values in wanted.items()
        }
        self._unmatched = {
            column: {value: re.compile(translate(value)) for value in values} for column, values in wanted.items()
        }
        self._others: dict[str, set[str]] = {column: set() for column in wanted}

    def passes(self, row: Mapping[str, Any]) -> bool:
        # Every column is compared, so that `unmatched` does not depend on the others.
        matching = [self._matches(column, pattern, row.get(column)) for column, pattern in self._patterns.items()]
        return all(matching)

    def unmatched(self) -> list[str]:
        """Return a message for each value that matched no row so far."""
        return [
            f"no {column} is {value!r}{nearest(value, self._others[column])}"
            for column, patterns in self._unmatched.items()
            for value in islice(patterns, NAMES_SHOWN)
        ]

    def nothing_passed(self, count: int, unit: str) -> str:
        """Return the message for a source none of whose rows passed."""
        why = "; ".join(self.unmatched()) or "each of its values occurs, but not together"
        return f"none of its {count} {unit}s matches tasks.from.filter: {why}"

    def warnings(self, uri: str) -> list[TaskProblem]:
        """Return a warning for each value that matched no row."""
        return [TaskProblem(uri, None, f"tasks.from.filter: {message}") for message in self.unmatched()]

    def _matches(self, column: str, pattern: re.Pattern[str], value: Any) -> bool:
        matching = []
        for text in _texts(value):
            if pattern.match(text):
                matching.append(text)
            elif len(self._others[column]) < _MOST_COMPARED:
                self._others[column].add(text)
        unmatched = self._unmatched[column]
        for wanted in [wanted for wanted, own in unmatched.items() if any(map(own.match, matching))]:
            del unmatched[wanted]
        return bool(matching)


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for entry in value for text in _texts(entry)]
    return [value if isinstance(value, str) else json.dumps(value, default=str)]


def ordered(positions: Sequence[int], source: TaskSource) -> list[int]:
    """Return the rows in the order of the job: at most `limit`, or all if unusable ones are left out.

    The order is that of a hash of seed and position, so that every version of Python, on a laptop and in a cluster,
    gives the same order.
    """
    if source.shuffle_seed is not None:
        seed = source.shuffle_seed
        positions = sorted(positions, key=lambda position: hashlib.sha256(f"{seed}:{position}".encode()).digest())
    return list(positions if source.skip_unusable else positions[: source.limit])


MakeTask = Callable[[Row], Task]
"""Raises RowError with all problems of the row."""

NameIfValid = Callable[[Row], str | None]
"""Returns the name of a row's task if the row is certainly valid; otherwise None, and the task must be created to check
it.
"""


class TableTasks(Sequence[Task]):
    """Selected rows of a table as tasks. Only the table is kept: a task is a function of its row."""

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
    name_if_valid: NameIfValid = lambda row: None,
) -> LoadedTasks:
    """Return the rows that `filter`, `shuffleSeed` and `limit` select, as valid tasks.

    Raises TaskSourceError with all problems, by line or row.
    """
    check_columns(place, table, [(column, "named in tasks.from.filter") for column in place.source.filter])
    problems: list[TaskProblem] = []
    if not len(table):
        expected = "one JSON object per line" if table.unit == "line" else "one task per row"
        problems = [TaskProblem(place.uri, None, f"has no tasks; expected {expected}")]
    passing, unmatched = _passing(place, table, problems)
    positions = ordered(passing, place.source)
    chosen: list[int] = []
    unusable: list[list[TaskProblem]] = []
    lines: dict[str, int] = {}
    ungraded: list[str] = []
    for position, row in zip(positions, table.rows(positions), strict=True):
        if place.source.limit is not None and len(chosen) == place.source.limit:
            break
        try:
            if isinstance(row, RowError):
                raise row
            task = make(row) if (name := name_if_valid(row)) is None else None
            name = name if task is None else task.name
            assert name is not None
            if name in lines:
                stands = f"already exists in {table.unit} {lines[name]}; names must be unique"
                raise RowError([f"name: a task named {name!r} {stands}"])
            lines[name] = table.number(position)
            chosen.append(position)
            if task is not None and not task.is_graded:
                ungraded.append(name)
        except RowError as error:
            unusable.append(_problems(place, table, position, error))
    if not place.source.skip_unusable:
        problems += [problem for of_task in unusable for problem in of_task]
    if problems:
        raise TaskSourceError(sorted(problems, key=lambda problem: problem.line or 0))
    left = left_out(place.uri, unusable, len(unusable) + len(chosen))
    warnings = [*warnings, *unmatched, *left, *without_verifier(place.uri, ungraded, len(chosen))]
    return LoadedTasks(TableTasks(table, chosen, make), warnings)


def check_columns(place: SourcePlace, table: Table, needed: Sequence[tuple[str, str]]) -> None:
    """Raise TaskSourceError for missing columns. `needed` has each column with the reason why it is needed."""
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


def _passing(place: SourcePlace, table: Table, problems: list[TaskProblem]) -> tuple[Sequence[int], list[TaskProblem]]:
    """Return the rows that match the filter, and warnings. An unreadable row that might match is a problem."""
    everything, wanted = range(len(table)), place.source.filter
    if not wanted or problems:
        return everything, []
    rows, chosen, seen = RowFilter(wanted), [], set[str]()
    for position, row in zip(everything, table.rows(everything), strict=True):
        if isinstance(row, RowError):
            if place.source.skip_unusable:
                chosen.append(position)
            else:
                problems += _problems(place, table, position, row)
            continue
        seen |= row.keys()
        if rows.passes(row):
            chosen.append(position)
    if not problems and not chosen:
        if absent := [column for column in wanted if column not in seen and table.columns is None]:
            message = f"has no column {absent[0]!r}, named in tasks.from.filter; it has {', '.join(sorted(seen))}"
        else:
            message = rows.nothing_passed(len(table), table.unit)
        problems.append(TaskProblem(place.uri, None, message))
    return chosen, rows.warnings(place.uri)


def _problems(place: SourcePlace, table: Table, position: int, error: RowError) -> list[TaskProblem]:
    return [TaskProblem(place.uri, table.number(position), message, table.unit) for message in error.messages]
