"""Output of commands: answers go to standard output, everything else to standard error."""

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 200
"""Width of tables in a file or a pipe, which have no width of their own; COLUMNS overrides it."""
LEAST_WIDTH_FOR_SENTENCES = 100
"""Narrower terminals break the sentences of a table into columns of single words."""
LEAST_WIDTH_FOR_NAMES = 30
"""Names of tasks are rarely longer."""
MOST_WIDTH = 100_000
"""Width in which every table fits."""


class Form(StrEnum):
    """Output format of a command."""

    TEXT = "text"
    JSON = "json"


FormOption = Annotated[Form, typer.Option("-o", help="Output format: text, or JSON for programs.")]


def named_file(option: str | None) -> Path | None:
    """Return the file named by `-o`; None if `-o` is left out or `json`. `./json` is a file."""
    return None if option is None or option == Form.JSON else Path(option)


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    # Characters that the terminal cannot encode become question marks instead of an exception.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, markup=False, soft_wrap=False)


out = _console(sys.stdout)
err = _console(sys.stderr, stderr=True)


@contextlib.contextmanager
def only_answers_on_stdout() -> Iterator[None]:
    """Redirect standard output to standard error, except that of `out`.

    User code (plugins, agents, tools and their programs) may print, and the answer must remain valid JSON or a valid export.
    """
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
    """Return the stream for commands that write their answer directly."""
    return cast(TextIO, out.file)


def program() -> str:
    """Return the command that starts this program in the user's shell: its path, if PATH does not find it."""
    started = Path(sys.argv[0])
    found = shutil.which("rolloutctl")
    if started.name != "rolloutctl" or (found and Path(found).resolve() == started.resolve()):
        return "rolloutctl"
    return shlex.quote(str(started))


def say(message: str, style: str = "") -> None:
    """Print a line for the user that is not part of the answer."""
    err.print(Text(harmless(message), style), soft_wrap=True)


def answer_json(value: Any) -> None:
    """Print the answer as JSON."""
    answer_stream().write(json_text(value, indent=2) + "\n")


def answer_json_line(value: Any) -> None:
    """Print a line of JSON at once, for programs that follow."""
    answer_stream().write(json_text(value) + "\n")
    answer_stream().flush()


def answer_json_list(values: Iterable[Any]) -> None:
    """Print a list like `answer_json`, with one item in memory at a time."""
    stream, before = answer_stream(), "["
    for value in values:
        stream.write(before + "\n" + textwrap.indent(json_text(value, indent=2), "  "))
        before = ","
    stream.write("\n]\n" if before == "," else "[]\n")


def answer_text(text: Text | str) -> None:
    """Print a line of the answer. The terminal wraps it, so that copied text has no padding."""
    out.print(text if isinstance(text, Text) else Text(harmless(text)), soft_wrap=True)


def answer_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table. Columns in `right` hold numbers. Control characters in cells are escaped. Where it is wider than
    the terminal, the frame and then the `optional` columns are left out, the least important ones first.
    """
    if title:
        out.print(Text(title, "bold"))
    cells = [[cell if isinstance(cell, Text) else Text(harmless(cell)) for cell in row] for row in rows]
    table, left_out = _table(columns, cells, right, HEAVY_HEAD), list[str]()
    for column in (None, *optional):
        if Measurement.get(out, out.options.update(max_width=MOST_WIDTH), table).maximum <= out.width:
            break
        left_out += [] if column is None else [column]
        kept = [position for position, name in enumerate(columns) if name not in left_out]
        shown = [[row[position] for position in kept] for row in cells]
        table = _table([columns[position] for position in kept], shown, right, None)
    out.print(table)
    if left_out:
        say(f"Not shown in {out.width} columns: {', '.join(reversed(left_out))}")


def answer_described(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table whose last column has sentences. A narrow terminal gets a paragraph for each row instead."""
    if out.width >= LEAST_WIDTH_FOR_SENTENCES:
        answer_table(title, columns, rows)
        return
    if title:
        out.print(Text(title, "bold"))
    for name, *facts, sentences in rows:
        given = [f"{column}: {fact}" for column, fact in zip(columns[1:], facts, strict=False) if str(fact)]
        out.print(Text.assemble((harmless(str(name)), "bold"), f"  {harmless('; '.join(given))}" * bool(given)))
        if str(sentences):
            words = sentences if isinstance(sentences, Text) else Text(harmless(sentences))
            out.print(Padding(words, (0, 0, 0, 2), expand=False))


def _table(columns: Sequence[str], rows: Sequence[Sequence[Text]], right: Sequence[str], frame: Box | None) -> Table:
    table = Table(header_style="bold", box=frame, pad_edge=frame is not None)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    # Names are in the first column. Only those that would take more than half of the terminal are broken.
    names = table.columns[0]
    longest = max(cell.cell_len for cell in (Text(columns[0]), *(row[0] for row in rows)))
    names.width = min(longest, max(LEAST_WIDTH_FOR_NAMES, out.width // 2))
    names.no_wrap = names.width == longest
    for row in rows:
        table.add_row(*row)
    return table


def number(value: float | None, digits: int = 2) -> str:
    """Format a number: `0.5`, `1`, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") or "0"


def percent(share: float | None) -> str:
    """Format a share: `45%`, or a dash."""
    return "-" if share is None else f"{100 * share:.0f}%"


def amount(count: int, noun: str) -> str:
    """Format a number of things: `1 rollout`, `9 rollouts`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Format a duration: `350 ms`, `4.2 s`, `12 min`, or a dash."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# Control characters and characters that reorder text. With both, text from a sandbox could fake output of this program.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON in which all characters that could affect a terminal are escaped. Python's json escapes only some."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _HIDDEN.sub(lambda found: found[0] if found[0] >= "\ud800" else f"\\u{ord(found[0]):04x}", text)


def harmless(text: str) -> str:
    """Remove colours from a model's or tool's text, and make other control characters visible."""
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    return _HIDDEN.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text
    )
