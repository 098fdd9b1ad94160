"""Where tasks come from: the manifest itself, or a file with one task a line, local or in object storage."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url
from pydantic import ValidationError

from agent_runtime.tasks.environments import environment_tasks
from rollout_api.manifest import explain, path_of, validate
from rollout_api.tasks import Task, Tasks, TaskSource

LINE_BYTES = 64 * 1024 * 1024
"""Longest line: a task has at most 256 + 1024 files of 200 KiB, and a file without line ends must not fill the memory."""

PROBLEMS_SHOWN = 100
"""Most broken lines that one error tells of; a file in the wrong form has as many as it has lines."""

_STORE_VARIABLES = {
    "s3": (
        "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION AWS_DEFAULT_REGION AWS_ENDPOINT_URL "
        "AWS_ENDPOINT AWS_WEB_IDENTITY_TOKEN_FILE AWS_ROLE_ARN AWS_VIRTUAL_HOSTED_STYLE_REQUEST AWS_SKIP_SIGNATURE"
    ),
    "gs": "GOOGLE_APPLICATION_CREDENTIALS GOOGLE_SERVICE_ACCOUNT GOOGLE_SERVICE_ACCOUNT_KEY",
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_SAS_KEY AZURE_STORAGE_CLIENT_ID "
        "AZURE_STORAGE_CLIENT_SECRET AZURE_STORAGE_TENANT_ID"
    ),
}
"""The variables that are a store's options, by scheme. obstore refuses those that it does not know, so no prefix will do."""


@dataclass(frozen=True)
class TaskProblem:
    """One broken line of a task file."""

    source: str
    line: int | None
    """From 1; None for the file as a whole."""
    message: str

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}" if self.line is not None else self.source
        return f"{place}: {self.message}"


class TaskSourceError(ValueError):
    """Tasks that cannot be used; `problems` has all that is wrong with them, line by line."""

    def __init__(self, problems: Sequence[TaskProblem]) -> None:
        self.problems = list(problems)
        shown = [str(problem) for problem in self.problems[:PROBLEMS_SHOWN]]
        if len(self.problems) > PROBLEMS_SHOWN:
            shown.append(f"… and {len(self.problems) - PROBLEMS_SHOWN} more problems")
        super().__init__("\n".join(shown))


def load_tasks(tasks: Tasks, base_dir: Path, environ: Mapping[str, str]) -> list[Task]:
    """The tasks of a job, in order.

    A relative `from.uri` starts at `base_dir`, the manifest's folder; object storage takes its credentials from `environ`.
    Raises TaskSourceError with every broken line, and for `stream`, whose tasks are submitted while the job runs.
    """
    if tasks.inline is not None:
        return list(tasks.inline)
    if tasks.environments is not None:
        return environment_tasks(tasks.environments)
    if tasks.from_ is None:
        raise TaskSourceError(
            [TaskProblem("tasks.stream", None, "has no tasks to read; they are submitted to the job")]
        )
    return read_rows(_chunks(tasks.from_, base_dir, environ), tasks.from_.uri, tasks.from_.limit)


def read_rows(chunks: Iterator[bytes], source: str, limit: int | None = None) -> list[Task]:
    """Tasks from the bytes of a JSONL file: one task a line, as in a manifest; empty lines are skipped.

    Raises TaskSourceError with every broken line among those that `limit` lets through.
    """
    tasks: dict[str, tuple[Task, int]] = {}
    problems: list[TaskProblem] = []
    rows = 0
    for number, line in _lines(chunks, source):
        if not line.strip():
            continue
        if limit is not None and rows == limit:
            break
        rows += 1
        task, messages = _row(line)
        if task is not None and task.name in tasks:
            messages = [
                f"name: a task named {task.name!r} stands in line {tasks[task.name][1]} already; names must differ"
            ]
        elif task is not None:
            tasks[task.name] = (task, number)
        problems += [TaskProblem(source, number, message) for message in messages]
    if not rows:
        problems.append(TaskProblem(source, None, "has no tasks; expected one JSON object a line"))
    if problems:
        raise TaskSourceError(problems)
    return [task for task, _ in tasks.values()]


def _row(line: bytes) -> tuple[Task | None, list[str]]:
    """The task of a line, or what is wrong with it."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(items)

    try:
        value = json.loads(line, object_pairs_hook=pairs, parse_constant=_no_constant)
        if not isinstance(value, dict):
            return None, ["expected a JSON object with at least name and prompt"]
        if repeated:
            return None, [f"{name}: is given twice; keep one of them" for name in repeated]
        return validate(Task, value), []
    except ValidationError as error:
        return None, [
            f"{path_of(place)}: {message}".removeprefix(": ") for place, message in explain(error, Task, value)
        ]
    except UnicodeError as error:
        return None, [f"is not UTF-8 text: {error.reason if isinstance(error, UnicodeDecodeError) else error}"]
    except RecursionError:
        return None, ["is nested too deeply"]
    except ValueError as error:
        return None, [f"is not JSON: {error}"]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


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


def _chunks(source: TaskSource, base_dir: Path, environ: Mapping[str, str]) -> Iterator[bytes]:
    """The bytes of a source. Raises TaskSourceError naming it, whatever goes wrong."""
    scheme, separator, path = source.uri.partition("://")
    try:
        if not separator or scheme == "file":
            yield from _from_file(base_dir / (path if separator else source.uri))
        else:
            yield from _from_store(scheme, source.uri, environ)
    except OSError as error:
        raise _unreadable(source, error.strerror or str(error)) from error
    except (BaseError, ValueError) as error:
        raise _unreadable(source, " ".join(str(error).split())[:500]) from error


def _unreadable(source: TaskSource, reason: str) -> TaskSourceError:
    return TaskSourceError([TaskProblem(source.uri, None, f"cannot be read: {reason}; see tasks.from.uri")])


def _from_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def _from_store(scheme: str, uri: str, environ: Mapping[str, str]) -> Iterator[bytes]:
    variables = _STORE_VARIABLES.get(scheme)
    if variables is None:
        raise ValueError(f"scheme {scheme!r} is not known, expected {', '.join(_STORE_VARIABLES)}, file or a path")
    folder, _, name = uri.rpartition("/")
    options: Any = {key.lower(): environ[key] for key in variables.split() if key in environ}
    plain = environ.get("AWS_ENDPOINT_URL", environ.get("AWS_ENDPOINT", "")).startswith("http://")
    store = from_url(folder, config=options, client_options={"allow_http": plain})
    for chunk in obstore.get(store, name).stream():
        yield bytes(chunk)
