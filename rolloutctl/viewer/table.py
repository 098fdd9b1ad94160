"""The rollouts of a run as a table that a page shows in parts: filtered, sorted, and grouped by task."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from pydantic_core import from_json

from agent_runtime.recording.seals import SealedResults
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store
from rolloutctl.ui.console import harmless
from rolloutctl.viewer.where import TEXT_FIELDS, WORDS, Condition, WrongCondition, sql

MOST_ROWS: Final = 500
"""Most rows of one answer. A page shows fewer than 100."""
MESSAGE_CHARACTERS: Final = 300
"""Most characters of a message in a row. The rollout's page has all."""


Line = Mapping[str, Any]
"""A result as JSON."""


@dataclass(frozen=True)
class Column:
    """A column of the table, and a field of filters."""

    name: str
    kind: str
    """`number`, `text`, `boolean`, or `list` of texts."""
    value: Callable[[Line], Any]
    meaning: str


def _field(name: str, default: Any = None) -> Callable[[Line], Any]:
    return lambda line: line.get(name, default)


def _seconds(part: str) -> Callable[[Line], Any]:
    return lambda line: line.get("seconds", {}).get(part)


def _usage(name: str) -> Callable[[Line], Any]:
    return lambda line: sum(line.get(usage, {}).get(name, 0) for usage in ("usage", "lostUsage"))


def _ended(line: Line) -> Any:
    return line.get("stopReason", "Completed") if line["outcome"] == "Completed" else line["outcome"]


def _raised(traceback: str) -> str | None:
    """Return the last line of a traceback, which has the exception."""
    return next(reversed(traceback.strip().splitlines()), None)


def _error(line: Line) -> str | None:
    raised = _raised(line.get("traceback") or "")
    return raised and raised[:MESSAGE_CHARACTERS]


def _tool_error(line: Line) -> str | None:
    """Return the first tool whose own code raised, with the exception."""
    for tool, text in (line.get("toolTracebacks") or {}).items():
        return f"{tool}: {_raised(text) or 'raised'}"[:MESSAGE_CHARACTERS]
    return None


def _plugin_error(line: Line) -> str | None:
    """Return the first plugin whose own code raised, with the hook and the exception."""
    for plugin, report in (line.get("plugins") or {}).items():
        if report.get("failed"):
            return f"{plugin}: {report.get('error')}"[:MESSAGE_CHARACTERS]
    return None


COLUMNS: Final = (
    Column("index", "number", _field("index"), "Number of the rollout."),
    Column("group", "number", _field("group"), "Number of its task."),
    Column("member", "number", _field("member"), "Number in its group."),
    Column("task", "text", _field("task"), "Name of its task."),
    Column(
        "tag", "list", lambda line: json.dumps([harmless(tag) for tag in line.get("tags", [])]), "Tags of its task."
    ),
    Column("outcome", "text", _field("outcome"), "Completed, or why it is masked."),
    Column("ended", "text", _ended, "Stop reason if Completed, else the outcome."),
    Column("reward", "number", _field("reward"), "Reward of the verifier."),
    Column("passed", "boolean", _field("passed"), "Whether everything that was required passed."),
    Column("turns", "number", _field("turns", 0), "Model calls."),
    Column("tools", "number", _field("toolCalls", 0), "Tool calls."),
    Column(
        "tokens",
        "number",
        lambda line: _usage("promptTokens")(line) + _usage("completionTokens")(line),
        "Tokens of all prompts and answers, also of lost attempts.",
    ),
    Column("promptTokens", "number", _usage("promptTokens"), "Tokens of all prompts."),
    Column("completionTokens", "number", _usage("completionTokens"), "Tokens of all answers."),
    Column("cachedTokens", "number", _usage("cachedTokens"), "Prompt tokens from the server's cache."),
    Column("seconds", "number", _seconds("total"), "Wall time from the request for the workspace to the seal."),
    Column("boot", "number", _seconds("boot"), "Seconds until its workspace was ready."),
    Column("model", "number", _seconds("model"), "Seconds with a running model call."),
    Column("toolSeconds", "number", _seconds("tools"), "Seconds of its tool calls."),
    Column("verifier", "number", _seconds("verifier"), "Seconds of grading."),
    Column("reason", "text", _field("reason"), "Reason in one word, if it is masked."),
    Column("message", "text", lambda line: line.get("message", "")[:MESSAGE_CHARACTERS] or None, "What happened."),
    Column("error", "text", _error, "The exception of the agent's own code."),
    Column("toolError", "text", _tool_error, "The first exception of a tool's own code."),
    Column("pluginError", "text", _plugin_error, "The first exception of a plugin's own code."),
    Column("verifierError", "text", _field("verifierMessage"), "Why the verifier raised or wrote no usable report."),
    Column("lost", "number", lambda line: len(line.get("failedAttempts", ())), "Lost attempts."),
    Column(
        "dropped", "number", _field("dropped", 0), "Files that could have changed the verdict, left out of grading."
    ),
    Column("forgeable", "boolean", _field("forgeable", False), "Whether the agent could forge the reward."),
    Column("forks", "number", _field("tokenForks", 0), "Forks of its tokens that the agent did not cause."),
    Column("stale", "boolean", _field("stale", False), "Whether its policy was too old."),
    Column("label", "text", _field("batch"), "Label with which it was submitted."),
    Column("policy", "text", lambda line: (line.get("policyVersions") or [None])[-1], "Newest policy that it used."),
    Column("started", "number", _field("started"), "Unix time of its start."),
    Column("finished", "number", _field("ended"), "Unix time of its end."),
)
KINDS: Final = {column.name: column.kind for column in COLUMNS}
_TEXT_POSITIONS: Final = [position for position, column in enumerate(COLUMNS) if column.name in TEXT_FIELDS]
_BOOLEANS: Final = frozenset(column.name for column in COLUMNS if column.kind == "boolean")

Row = dict[str, Any]


class RolloutTable(SealedResults):
    """The sealed rollouts of a run. While `load` reads them, those read so far can be queried. Must be closed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.damaged: dict[int, str] = {}
        """Seals that cannot be read, by rollout."""
        columns = ", ".join(f'"{column.name}"' for column in COLUMNS if column.name != "index")
        self._table.execute(f'CREATE TABLE rollouts ("index" INTEGER PRIMARY KEY, {columns}, {WORDS})')
        self._table.execute('CREATE INDEX by_group ON rollouts ("group")')

    def _insert(self, rows: Iterable[tuple[int, bytes, str, float | None, str | None]]) -> None:
        listed = list(rows)
        super()._insert(listed)
        marks = ", ".join("?" for _ in range(len(COLUMNS) + 1))
        self._table.executemany(
            f"INSERT OR IGNORE INTO rollouts VALUES ({marks})", (_values(from_json(line)) for _, line, *_ in listed)
        )

    def _report_damage(self, error: RecordCorrupt) -> None:
        self.damaged[int(PurePosixPath(error.key).stem)] = str(error)

    def count(self, where: Condition | None = None) -> int:
        """Return the number of rollouts that fit."""
        clause, values = sql(where, KINDS)
        return int(self.query(f"SELECT count(*) FROM rollouts WHERE {clause}", values)[0][0])

    def rows(
        self,
        where: Condition | None = None,
        sort: str = "index",
        *,
        descending: bool = False,
        offset: int = 0,
        limit: int,
    ) -> list[Row]:
        """Return some of the rollouts that fit. Those without a value come last. Raises WrongCondition."""
        if sort not in KINDS:
            raise WrongCondition(f"sort must be a field, not {sort!r}")
        clause, values = sql(where, KINDS)
        order = f'"{sort}"'
        direction = "DESC" if descending else "ASC"
        found = self.query(
            f'SELECT * FROM rollouts WHERE {clause} ORDER BY {order} IS NULL, {order} {direction}, "index" '
            "LIMIT ? OFFSET ?",
            (*values, limit, offset),
        )
        return [_row(values) for values in found]

    def groups(
        self, where: Condition | None = None, *, worst_first: bool = False, offset: int = 0, limit: int
    ) -> tuple[int, list[list[Row]]]:
        """Return the number of groups with a rollout that fits, and the rollouts of some of them that fit, by group."""
        clause, values = sql(where, KINDS)
        order = 'avg(reward) IS NULL, avg(reward), "group"' if worst_first else '"group"'
        listed = f'SELECT "group" FROM rollouts WHERE {clause} GROUP BY "group"'
        count = int(self.query(f"SELECT count(*) FROM ({listed})", values)[0][0])
        numbers = [
            row[0] for row in self.query(f"{listed} ORDER BY {order} LIMIT ? OFFSET ?", (*values, limit, offset))
        ]
        marks = ", ".join("?" for _ in numbers)
        found = self.query(
            f'SELECT * FROM rollouts WHERE {clause} AND "group" IN ({marks}) ORDER BY "group", member, "index"',
            (*values, *numbers),
        )
        members: dict[int, list[Row]] = {number: [] for number in numbers}
        for row in map(_row, found):
            members[row["group"]].append(row)
        return count, list(members.values())

    def query(self, text: str, values: Iterable[Any] = ()) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a query over `rollouts`."""
        return self._table.execute(text, tuple(values)).fetchall()


def _row(values: Sequence[Any]) -> Row:
    row: Row = {column.name: value for column, value in zip(COLUMNS, values, strict=False) if value is not None}
    row["tag"] = json.loads(row["tag"])
    for name in _BOOLEANS & row.keys():
        row[name] = bool(row[name])
    return row


def _values(line: Line) -> list[Any]:
    values = [column.value(line) for column in COLUMNS]
    # What a model, a task or a tool wrote could turn the direction of other cells. Few texts have such characters.
    values = [harmless(value) if isinstance(value, str) and not value.isprintable() else value for value in values]
    words = "\n".join(str(values[position]) for position in _TEXT_POSITIONS if values[position])
    return [*values, words.lower()]


def fields() -> list[Mapping[str, str]]:
    """Return the fields of filters for the page."""
    return [{"name": column.name, "kind": column.kind, "meaning": column.meaning} for column in COLUMNS]
