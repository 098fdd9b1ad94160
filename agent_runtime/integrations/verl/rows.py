"""Convert a row of verl's dataset into a task.

The prompt is the row's prompt. The other fields of the task (files, setup, verifier, timeouts) are in
`extra_info.task`, in the format of a manifest, as an object or as JSON text, which Parquet stores unchanged. A row
without it that names a Harbor folder (`local_task_path`, `instance_id`) gets the whole task from there, including the
prompt.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ValidationError

from agent_runtime.integrations.harbor_server.rows import HarborRows, NoTask
from agent_runtime.tasks import TaskSourceError
from rollout_api.manifest import explain, validate
from rollout_api.tasks import Task


class RowError(ValueError):
    """A row that is not a task; the message names the row and the problem."""


@dataclass(frozen=True)
class Row:
    """One prompt that verl submits."""

    uid: str
    """verl's own identifier, kept among the task's tags."""
    task: Task
    system_prompt: str | None
    tools_kwargs: Mapping[str, Any]


class ActiveRows:
    """Rows by uid, from which verl's tools get their arguments. A row is kept while a caller has a reference to the
    result of `begin`, because REMAX has two groups with the same uid that end separately.
    """

    def __init__(self) -> None:
        self._rows: WeakValueDictionary[str, Row] = WeakValueDictionary()

    def begin(self, row: Row) -> Row:
        """Return the row of that uid. Hold it until its group ends."""
        return self._rows.setdefault(row.uid, row)

    def tools_kwargs(self, task: Task) -> Mapping[str, Any]:
        """Return the arguments in the row of the task."""
        row = next((found for tag in reversed(task.tags) if (found := self._rows.get(tag))), None)
        return {} if row is None else row.tools_kwargs


def read_row(fields: Mapping[str, Any], harbor: HarborRows | None = None) -> Row:
    """Return the task of a row. Raises RowError."""
    uid = str(fields["uid"])
    place = f"row {fields.get('index', '?')} of {fields.get('data_source', 'the dataset')}"
    if "_" in uid:
        raise RowError(f"{place}: uid {uid!r} contains '_', at which verl splits its keys; use a uid without '_'")
    extra = fields.get("extra_info") or {}
    if harbor is not None and not extra.get("task") and (found := _harbor_task(harbor, fields, place)) is not None:
        task = found.model_copy(update={"tags": [*found.tags, uid]})
        return Row(uid, task, None, _plain(fields.get("tools_kwargs")) or {})
    system, prompt = _prompt(_plain(fields["raw_prompt"]), place)
    wire = _task_fields(extra.get("task"), place)
    tags = wire.get("tags") or []
    # Tags that are not a list stay as they are: the check of the task refuses them.
    wire |= {"prompt": prompt, "tags": [*tags, uid] if isinstance(tags, list) else tags}
    wire.setdefault("name", _name(fields))
    try:
        task = validate(Task, wire)
    except ValidationError as error:
        problems = "; ".join(map(str, explain(error, Task, wire)))
        raise RowError(f"{place}: extra_info.task: {problems}") from error
    return Row(uid, task, system, _plain(fields.get("tools_kwargs")) or {})


def _harbor_task(harbor: HarborRows, fields: Mapping[str, Any], place: str) -> Task | None:
    try:
        return harbor.task(fields)
    except (NoTask, TaskSourceError, OSError, UnicodeDecodeError, ValidationError) as error:
        raise RowError(f"{place}: {error}") from error


def _prompt(messages: Any, place: str) -> tuple[str | None, str]:
    roles = [message.get("role") for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise RowError(
            f"{place}: the prompt has the roles {', '.join(map(str, roles))}; expected one user message, "
            "optionally after a "
            "system message. Include earlier turns in the user message"
        )
    texts = [message.get("content") for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"{place}: the prompt has parts that are not text (images, video); only text is supported")
    return (texts[0] if len(texts) == 2 else None), texts[-1]


def _task_fields(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"{place}: extra_info.task is not JSON: {error}") from None
    value = {} if value is None else _without_nulls(_plain(value))
    if not isinstance(value, dict):
        raise RowError(
            f"{place}: extra_info.task is {type(value).__name__}, expected a task as an object or as JSON text"
        )
    return value


def _without_nulls(value: Any) -> Any:
    """Remove nulls: Parquet gives every row all fields that any row of the column has."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Convert NumPy's types to Python's lists and numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _name(fields: Mapping[str, Any]) -> str:
    name = re.sub(r"[^A-Za-z0-9._@+=-]+", "-", f"{fields.get('data_source') or 'row'}-{fields.get('index', 0)}")
    return name.lstrip("._@+=-")[:200]
