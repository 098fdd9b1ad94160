"""A run as one Parquet file with one row for each rollout, and helpers for other Parquet exports."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args

from agent_runtime.export.whole_file import whole_file
from agent_runtime.recording.messages import fold, last_of_each_branch
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Result

ROW_GROUP: Final = 64
"""Rows that are in memory at once. The conversation of a long rollout needs a few MB."""

Row = dict[str, Any]


class PyarrowMissing(Exception):
    """Parquet was requested, but pyarrow is not installed."""

    def __init__(self) -> None:
        super().__init__("Parquet needs pyarrow; install agent-rollouts[parquet]")


async def write_rollouts(run: RunReader, file: Path) -> int:
    """Write a row for every sealed rollout, by index; return the number of rows. Raises RecordCorrupt, PyarrowMissing,
    OSError.

    The columns are the fields of the result, by their names in `results.jsonl`; objects are JSON text. `conversations`
    is a JSON list with `messages` and `tools` of each branch, as in format openai.
    """
    return await write_table(file, _schema, _rollouts(run))


async def write_table(file: Path, schema: Callable[[Any], Any], rows: AsyncIterator[Row]) -> int:
    """Write rows of a schema, which a function creates from the module pyarrow; return the number of rows.

    Raises PyarrowMissing, OSError, and errors of `rows`; the file is then unchanged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PyarrowMissing from error
    columns = schema(pyarrow)
    count = 0
    # If interrupted, pyarrow closes the file as a valid one with fewer rows.
    with whole_file(file) as partial, pyarrow.parquet.ParquetWriter(partial, columns, compression="zstd") as writer:
        pending: list[Row] = []
        async for row in rows:
            pending.append(row)
            count += 1
            if len(pending) == ROW_GROUP:
                writer.write_table(pyarrow.Table.from_pylist(pending, columns))
                pending = []
        if pending:
            writer.write_table(pyarrow.Table.from_pylist(pending, columns))
    return count


def json_text(value: Any) -> str:
    """Return JSON on one line, for values whose fields differ between rows. Parquet would give each row the fields of
    all rows.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _schema(pyarrow: Any) -> Any:
    plain = {
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
        list[str]: pyarrow.list_(pyarrow.string()),
    }
    columns = [(name, plain.get(kind, pyarrow.string())) for name, kind in _FIELDS.items()]
    return pyarrow.schema([*columns, ("conversations", pyarrow.string())])


async def _rollouts(run: RunReader) -> AsyncIterator[Row]:
    for index, seal in run.seals.items():
        turns = last_of_each_branch(fold(await run.records(index)))
        conversations = [{"messages": turn.conversation(), "tools": turn.tools} for turn in turns]
        row = {name: _cell(name, value) for name, value in seal.result.wire().items()}
        yield {**row, "conversations": json_text(conversations)}


def _cell(name: str, value: Any) -> Any:
    return json_text(value) if isinstance(value, dict | list) and _FIELDS[name] != list[str] else value


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation


_FIELDS: Final = {field.alias or name: _without_none(field.annotation) for name, field in Result.model_fields.items()}
"""Names and types of the result's fields, in order."""
