"""Rows of a JSONL or Parquet file, as a task format reads them: by position, each parsed when it is asked for.

A table holds a file's bytes, not the values in them: ten thousand parsed rows would take several times their file's memory.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, Protocol

from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import TaskProblem, TaskSourceError

Row = dict[str, Any]

LINE_BYTES = 64 * 1024 * 1024
"""Longest line: a task has at most 256 + 1024 files of 200 KiB, and a file without line ends must not fill the memory."""

PARQUET_BATCH = 256
"""Rows that are decoded, and later turned into Python objects, at once."""


class RowError(ValueError):
    """A row that is no task; `messages` say all that is wrong with it."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("; ".join(messages))
        self.messages = list(messages)


class Table(Protocol):
    """Rows by position."""

    unit: Literal["line", "row"]
    columns: Collection[str] | None
    """Names of the columns that are in the file; None where each row has its own."""

    def __len__(self) -> int: ...

    def number(self, position: int) -> int:
        """What a person calls the row: its line, or its number from 1."""

    def row(self, position: int) -> Row:
        """The values of one row. Raises RowError."""

    def rows(self, positions: Sequence[int]) -> Iterator[Row | RowError]:
        """The values of many rows, in the order given."""


def open_table(place: SourcePlace, wanted: Collection[str] | None = None) -> Table:
    """The rows of a source. `wanted` are the only columns that are needed; None for all.

    Raises TaskSourceError where the file as a whole cannot be read.
    """
    if place.is_parquet:
        return ParquetTable(place, wanted)
    only_first = not place.source.filter and place.source.shuffle_seed is None
    return JsonLines(place.chunks(), place.uri, place.source.limit if only_first else None)


class JsonLines:
    """One JSON object a line; empty lines are skipped. Lines after the first `limit` are not looked at."""

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
            message = f"is longer than {LINE_BYTES} bytes; expected one task a line"
            raise TaskSourceError([TaskProblem(source, number, message)])
    yield number, rest


def _object(line: bytes) -> Row:
    """The JSON object of a line. Raises RowError."""
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
        raise RowError(["expected a JSON object with at least name and prompt"])
    if repeated:
        raise RowError([f"{name}: is given twice; keep one of them" for name in repeated])
    if rb"\ud" in line.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start]).strip("'")
            raise RowError(
                [f"has {found}, half of a character, which no text can hold; give both halves, or neither"]
            ) from None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


class ParquetTable:
    """A Parquet file in Arrow's memory. An empty value is one that is not there."""

    unit: Literal["line", "row"] = "row"

    def __init__(self, place: SourcePlace, wanted: Collection[str] | None) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise place.refused("Parquet needs pyarrow; install agent-rollouts[parquet]") from error
        with place.open() as file, place.readable():
            try:
                # A local file by its path: pyarrow then reads it itself, and not through the interpreter.
                opened = parquet.ParquetFile(place.local_path or file)
                self.columns: Collection[str] | None = opened.schema_arrow.names
                kept = [name for name in opened.schema_arrow.names if wanted is None or name in wanted]
                # In batches, so that only parts of the columns are there in their encoded form too.
                batches = list(opened.iter_batches(PARQUET_BATCH, columns=kept))
                self._table = pyarrow.Table.from_batches(batches) if batches else opened.read(columns=kept)
                self._may_have_nulls = any(
                    column.null_count or pyarrow.types.is_nested(column.type) for column in self._table.columns
                )
            except (pyarrow.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())[:300]
                raise place.unreadable(f"it is no readable Parquet file ({reason})") from error
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
    """A column that only some rows have is null in all others, and so are the fields of a struct."""
    return {
        name: _without_nulls(value)
        if isinstance(value, dict)
        else [_without_nulls(item) if isinstance(item, dict) else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in row.items()
        if value is not None
    }
