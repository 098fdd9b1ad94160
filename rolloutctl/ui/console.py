"""Where a command's words go: what was asked for to standard output, everything else to standard error."""

import contextlib
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolloutctl.ui.transcript import harmless, json_text

PIPE_WIDTH = 200
"""Columns for tables that go into a file or a pipe, where nothing wraps; COLUMNS overrides it."""


class Form(StrEnum):
    """How a command answers."""

    TEXT = "text"
    JSON = "json"


FormOption = Annotated[Form, typer.Option("-o", help="How to answer: for people, or as JSON for machines.")]


def named_file(option: str | None) -> Path | None:
    """The file that an `-o` names. None where it is left out, or is `json` as everywhere; `./json` is a file."""
    return None if option is None or option == Form.JSON else Path(option)


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    # A terminal that cannot show a letter gets a question mark, never a traceback.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, markup=False, soft_wrap=False)


out = _console(sys.stdout)
err = _console(sys.stderr, stderr=True)


@contextlib.contextmanager
def only_answers_on_stdout() -> Iterator[None]:
    """Send to standard error what user code (plugins, agents, tools, and programs that they start) writes to standard
    output, so that the answer stays valid JSON or a valid export. Answers go to `out`."""
    sys.stdout.flush()
    stdout, answers = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    with (
        open(answers, "w", encoding=stdout.encoding, errors="replace") as out.file,
        contextlib.redirect_stdout(sys.stderr),
    ):
        try:
            yield
        finally:
            os.dup2(answers, 1)
    out.file = stdout


def answer_stream() -> TextIO:
    """Where the answer goes, for commands that write it by themselves."""
    return cast(TextIO, out.file)


def say(message: str, style: str = "") -> None:
    """A line for the person, not part of the answer."""
    err.print(Text(harmless(message), style), soft_wrap=True)


def answer_json(value: Any) -> None:
    """The answer as JSON: the only thing on standard output."""
    answer_stream().write(json_text(value, indent=2) + "\n")


def answer_json_list(values: Iterable[Any]) -> None:
    """As `answer_json` of a list, of which one item is in memory at a time."""
    stream, before = answer_stream(), "["
    for value in values:
        stream.write(before + "\n" + textwrap.indent(json_text(value, indent=2), "  "))
        before = ","
    stream.write("\n]\n" if before == "," else "[]\n")


def answer_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[str] = ()
) -> None:
    """A table; the columns named in `right` hold numbers. Cells are made harmless."""
    if title:
        out.print(Text(title, "bold"))
    table = Table(header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(harmless(cell)) for cell in row))
    out.print(table)


def number(value: float | None, digits: int = 2) -> str:
    """`0.5`, `1`, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") or "0"


def duration(seconds: float | None) -> str:
    """`350 ms`, `4.2 s`, `12 min`, or a dash."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
