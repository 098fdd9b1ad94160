"""Upload of a job's tasks to its output: a file, a folder, or tasks from a program.

Tasks are stored below `sources/` in a folder named by the digest of their content. Equal tasks are stored once, and the
content that a job refers to cannot change.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.recording.store import Store
from agent_runtime.tasks import read_rows
from agent_runtime.tasks.folders import EXECUTABLES, executable_files
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task, TaskSource
from rolloutctl.errors import CommandError

FOLDER = "sources"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class LocalSource:
    """A file or folder of this machine, and its destination below `output.uri`."""

    files: Sequence[tuple[str, Path]]
    """Files by key relative to `output.uri`."""
    key: str
    """Key of the file or folder."""
    executables: Sequence[str] = ()
    """Executable files of a folder, relative to it. Object storage does not keep modes."""


def local_source(job: RolloutJob, base_dir: Path) -> LocalSource | None:
    """Return the local source in `tasks.from`, or None. Raises CommandError if the path does not exist."""
    source = job.spec.tasks.from_
    scheme, separator, path = ("", "", "") if source is None else source.uri.partition("://")
    if source is None or (separator and scheme != "file"):
        return None
    root = (base_dir / (path if separator else source.uri)).resolve()
    if not root.exists():
        raise CommandError(f"{root}: no such file or folder; correct spec.tasks.from.uri")
    found, executables = [root], list[str]()
    if root.is_dir():
        listing = root / EXECUTABLES
        found = sorted(entry for entry in root.rglob("*") if entry.is_file() and entry != listing)
        executables = executable_files(root)
    names = [entry.relative_to(root.parent).as_posix() for entry in found]
    digest = hashlib.sha256()
    for name, entry in zip(names, found, strict=True):
        digest.update(f"{name}\0{_digest(entry)}\n".encode())
    digest.update(json.dumps(executables).encode() if executables else b"")
    folder = f"{FOLDER}/{digest.hexdigest()[:32]}"
    files = [(f"{folder}/{name}", entry) for name, entry in zip(names, found, strict=True)]
    return LocalSource(files, f"{folder}/{root.name}", executables)


def with_uri(job: RolloutJob, uri: str) -> RolloutJob:
    """Return the job with its tasks at another place."""
    given = job.spec.tasks.from_
    assert given is not None
    return with_source(job, given.model_copy(update={"uri": uri}))


def with_source(job: RolloutJob, source: TaskSource) -> RolloutJob:
    """Return the job with another source of its tasks, and all else that it says about tasks."""
    tasks = job.spec.tasks.moved_to(from_=source)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": tasks})})


async def upload(source: LocalSource, store: Store) -> int:
    """Upload missing files; return their number. Raises StorageError."""
    there = {meta.key: meta.size for meta in await store.list(source.key.rpartition("/")[0])}
    missing = [(key, file) for key, file in source.files if there.get(key) != file.stat().st_size]
    if source.executables:
        await store.create(f"{source.key}/{EXECUTABLES}", json.dumps(source.executables).encode())
    for key, file in missing:
        await store.create_stream(key, _chunks(file))
    return len(missing)


async def stored_tasks(job: RolloutJob, tasks: Iterable[Task | Mapping[str, Any]], store: Store) -> RolloutJob:
    """Store tasks from a program as rows, and return the job with them as its source. Raises TaskSourceError, which names
    each invalid task by number.
    """
    wire = (task.wire() if isinstance(task, Task) else task for task in tasks)
    data = b"".join(json.dumps(task, separators=(",", ":")).encode() + b"\n" for task in wire)
    read_rows(iter([data]), "tasks")
    key = f"{FOLDER}/{hashlib.sha256(data).hexdigest()[:32]}/tasks.jsonl"
    await store.create(key, data)
    return with_source(job, TaskSource(uri=f"{store.uri}/{key}"))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk
