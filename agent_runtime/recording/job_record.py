"""One run of a job in storage: its definition (`job.json`), its seals, and its end."""

import contextlib
import hashlib
import json
import math
import re
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from agent_runtime.recording.results import result_line, statistics_of, stats_json, with_groups
from agent_runtime.recording.seals import SealedResults, read_seals
from agent_runtime.recording.segments import RecordCorrupt, compact_json, validated
from agent_runtime.recording.store import PART_BYTES, READS_AT_ONCE, StorageError, Store
from agent_runtime.statistics import with_advantages
from rollout_api.base import ApiModel
from rollout_api.records import RECORD_VERSION, Result, Seal
from rollout_api.rollout_job import MUTABLE_FIELDS, RolloutJob
from rollout_api.tasks import Task

_MOST_LINES: Final = 20
_LONGEST_VALUE: Final = 60


def differences(old: Any, new: Any, path: str) -> list[str]:
    """Return lines `path.to[0].field: old → new`; beyond 20 only their number. Empty if both are equal."""
    lines = _walk(old, new, path)
    if len(lines) > _MOST_LINES:
        return [*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES} more"]
    return lines


def _walk(old: Any, new: Any, path: str) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        return [line for name in names for line in _walk(old.get(name), new.get(name), f"{path}.{name}")]
    if _is_list(old) and _is_list(new) and len(old) == len(new):
        return [
            line
            for index, (before, after) in enumerate(zip(old, new, strict=True))
            for line in _walk(before, after, f"{path}[{index}]")
        ]
    return [] if old == new else [f"{path}: {_shown(old)} → {_shown(new)}"]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if _is_list(value):
        return "1 entry" if len(value) == 1 else f"{len(value)} entries"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


class ManifestChanged(Exception):
    """A run with this name exists, with another manifest or other tasks. `changes` are lines `field: old → new`."""

    def __init__(self, name: str, changes: Sequence[str]) -> None:
        listed = "\n".join(f"  {change}" for change in changes)
        super().__init__(
            f"{name} was started with another manifest:\n{listed}\n"
            "Undo the change to resume that run, start another one with --new, or give the job another name."
        )
        self.changes = tuple(changes)


class NameTaken(Exception):
    """The folder of this run belongs to another job."""


class TaskList(ApiModel):
    """The tasks with which a run was started."""

    count: int
    digest: str
    """SHA-256 over all of them in order."""
    names: list[str]


class JobFile(ApiModel):
    """`job.json`: the definition of a run."""

    version: int = RECORD_VERSION
    uid: str
    created: float
    """Unix seconds."""
    manifest: dict[str, Any]
    tasks: TaskList
    command: str | None = None
    """Shell command that began the run, and that resumes it; None if no command did."""


class JobRecord:
    """The folder of one run."""

    def __init__(self, store: Store, folder: str, job: RolloutJob, job_file: JobFile) -> None:
        self.output = store
        """All runs of this output, and the layers that they share."""
        self.store = store.below(folder, made_by="job.json")
        """Storage below the run's folder."""
        self.folder, self.job, self.uid, self._job_file = folder, job, job_file.uid, job_file
        self.resumed = False
        """Whether an earlier process, or another runner, began the run."""
        self.may_delete = True
        """Whether storage has deleted all objects so far that it was asked to delete."""

    @classmethod
    async def open(cls, store: Store, job: RolloutJob, tasks: Sequence[Task], *, new: bool = False) -> "JobRecord":
        """Find the run and begin it."""
        record = await cls.find(store, job, tasks, new=new)
        await record.begin()
        return record

    @classmethod
    async def find(
        cls, store: Store, job: RolloutJob, tasks: Sequence[Task], *, new: bool = False, command: str | None = None
    ) -> "JobRecord":
        """Return the run that a start of this job resumes, or a new one, of which nothing is written before `begin`.
        `command` is kept in a new one.

        A job with `metadata.uid` has one run. Otherwise it is the newest run of that name with the same manifest and
        tasks. `new` always gives another run. Raises ManifestChanged, NameTaken, RecordCorrupt.
        """
        name, uid, created, listed = job.metadata.name, job.metadata.uid, time.time(), task_list(tasks)
        # A new run needs nothing of the others, so a damaged one does not prevent it.
        if (new or uid is None) and (runs := await _runs_of(store, name, only_readable=new)):
            # The new run is the newest even if the clock was set back, or another machine's clock is ahead.
            created = max(created, math.nextafter(runs[0][1].created, math.inf))
            uid = _run_to_resume(runs, job, listed)[1].uid
        if new or uid is None:
            uid = str(uuid.uuid4())
        wanted = JobFile(uid=uid, created=created, manifest=job.wire(), tasks=listed, command=command)
        record = cls(store, run_folder(name, uid), job, wanted)
        record.resumed = await record._exists()
        return record

    async def begin(self) -> None:
        """Write `job.json`, which creates the run. Call this after everything else is open: a run of a failed start
        would count as the newest one. Raises as `find`.
        """
        existing = await self.store.get("job.json") if self.resumed else None
        self.resumed = existing is not None
        if existing is not None:
            # Write the same bytes again for a new modification time: `gc` then spares the run until its first rollout
            # writes.
            await self.store.put("job.json", existing)
        elif not await self.store.create("job.json", self._job_file.model_dump_json().encode()):
            self.resumed = await self._exists()  # another runner of this job began it first

    async def _exists(self) -> bool:
        existing = await read_job_file(self.output, self.folder)
        if existing is None:
            return False
        if existing.uid != self.uid:
            raise NameTaken(
                f"{self.store.uri} belongs to another job (uid {existing.uid}, this one is {self.uid}); "
                "give one of them another name, or another output.uri"
            )
        if changes := _changes(existing, self.job, self._job_file.tasks):
            raise ManifestChanged(self.store.uri, changes)
        return True

    async def seals(self) -> Mapping[int, Seal]:
        """Return seals by index. Raises RecordCorrupt naming the key of a damaged one."""
        return await read_seals(self.store)

    async def begun(self) -> set[int]:
        """Return the rollouts with at least one claimed attempt."""
        return {int(folder) for folder in await self.store.folders("attempts") if folder.isdigit()}

    async def attempts(self, index: int) -> list[int]:
        """Return the claimed attempts of a rollout, in order."""
        return await read_attempt_numbers(self.store, index)

    async def record_report(self, group: int) -> None:
        """Record that plugins were notified of that group's end."""
        await self.store.create(f"groups/{group}", b"")

    async def reported_groups(self) -> set[int]:
        """Return the groups whose end was reported to plugins."""
        return {int(found.key.rpartition("/")[2]) for found in await self.store.list("groups")}

    async def abort(self, reason: str, message: str) -> None:
        """Record why the job must end. The first reason is kept."""
        await self.store.create("abort.json", compact_json({"reason": reason, "message": message, "time": time.time()}))

    async def finish_shard(self, shard: int, verdict: dict[str, Any]) -> None:
        """Write a shard's verdict. The first one is kept."""
        await self.store.create(f"shards/{shard}.json", compact_json(verdict))

    async def finish(self, shards: int) -> dict[str, Any] | None:
        """Write `results.jsonl` and `stats.json` when all shards have ended; return the statistics, None if a shard has
        not ended. Raises StorageError if storage has lost sealed rollouts.
        """
        ended = {meta.key for meta in await self.store.list("shards")}
        if not all(f"shards/{shard}.json" in ended for shard in range(shards)):
            return None
        found = await self.store.get_all([f"shards/{shard}.json" for shard in range(shards)])
        verdicts = [parsed_json("shards", data or b"{}") for data in found]
        stats = await self._write_results(sum(verdict.get("sealed") or 0 for verdict in verdicts))
        stats = with_groups(stats, [verdict.get("plugins") or {} for verdict in verdicts])
        await self.store.put("stats.json", stats_json(stats))
        return stats

    async def _write_results(self, ended: int) -> dict[str, Any]:
        """Write `results.jsonl` in bounded memory; return the statistics of all results, of which there were `ended`."""
        with (
            contextlib.closing(SealedResults(self.store)) as sealed,
            tempfile.SpooledTemporaryFile(max_size=PART_BYTES) as lines,
        ):
            await sealed.load()
            if len(sealed) < ended:
                raise StorageError(
                    f"{self.store.uri}/seals: {ended - len(sealed)} of {ended} finished rollouts are missing; they were "
                    "deleted, or written to a folder that was replaced. Run the same command again to run them again"
                )

            def written() -> Iterator[Result]:
                for result in with_advantages(sealed.values(), self.job.spec.reward):
                    lines.write(result_line(result))
                    yield result

            stats = statistics_of(written())
            await self.store.put_file("results.jsonl", lines)
        return stats


def output_uri(job: RolloutJob, base_dir: Path) -> str:
    """Return the destination of results; a relative folder starts at the manifest's."""
    uri = job.spec.output.uri
    return uri if "://" in uri else str((base_dir / uri).resolve())


def run_folder(name: str, uid: str) -> str:
    """Return the folder of a job's run. A copy of the run has the same name and uid, and another folder."""
    return f"{name}-{uid[:8]}"


def is_copy(folder: str, job_file: JobFile) -> bool:
    """Whether a folder is a copy of its run, or was renamed: a job resumes only the folder that its uid names."""
    return folder != run_folder(str(job_file.manifest["metadata"]["name"]), job_file.uid)


async def existing_run(store: Store, job: RolloutJob) -> Store | None:
    """Return the folder of the run that `JobRecord.open` resumes for this job; None if it starts a first one."""
    name, uid = job.metadata.name, job.metadata.uid
    if uid is not None:
        return store.below(run_folder(name, uid))
    runs = await _runs_of(store, name)
    return store.below(_run_to_resume(runs, job)[0]) if runs else None


async def newest_run(store: Store, name: str) -> tuple[str, JobFile] | None:
    """Folder and `job.json` of the newest run of that name. Copies do not count."""
    return next(iter(await _runs_of(store, name)), None)


async def _runs_of(store: Store, name: str, *, only_readable: bool = False) -> list[tuple[str, JobFile]]:
    """Return the folders and `job.json` of the runs of that name, newest first. Raises RecordCorrupt for a damaged one,
    unless `only_readable`.
    """
    of_name = re.compile(rf"{re.escape(name)}-[0-9a-f]{{8}}")
    runs = []
    for folder in await store.folders():
        if not of_name.fullmatch(folder):
            continue
        try:
            job_file = await read_job_file(store, folder)
        except RecordCorrupt:
            if not only_readable:
                raise
            continue
        # A folder without a job.json remains from an interrupted deletion.
        if job_file is not None and not is_copy(folder, job_file):
            runs.append((folder, job_file))
    return sorted(runs, key=lambda run: (run[1].created, run[0]), reverse=True)


def _run_to_resume(
    runs: Sequence[tuple[str, JobFile]], job: RolloutJob, tasks: TaskList | None = None
) -> tuple[str, JobFile]:
    """Return the newest run with that manifest and tasks; if all differ, the newest one, which is then refused."""
    for run in runs:
        with contextlib.suppress(ValidationError):  # an older version may have written it
            if not _changes(run[1], job, tasks):
                return run
    return runs[0]


async def job_files(store: Store) -> AsyncIterator[tuple[str, JobFile | RecordCorrupt]]:
    """Yield the folder and `job.json` of each run, or why this file cannot be read. Other folders are not runs."""
    folders = await store.folders()
    for start in range(0, len(folders), READS_AT_ONCE):
        batch = folders[start : start + READS_AT_ONCE]
        for folder, data in zip(batch, await store.get_all(list(map(_job_key, batch))), strict=True):
            if data is None:
                continue
            try:
                yield folder, _parsed_job_file(folder, data)
            except RecordCorrupt as error:
                yield folder, error


async def read_job_file(store: Store, folder: str) -> JobFile | None:
    """Return `job.json` of a run, None if it is missing. Raises RecordCorrupt if it is damaged or has a newer version."""
    data = await store.get(_job_key(folder))
    return None if data is None else _parsed_job_file(folder, data)


def _job_key(folder: str) -> str:
    return f"{folder}/job.json"


def _parsed_job_file(folder: str, data: bytes) -> JobFile:
    key = _job_key(folder)
    found = validated(key, JobFile.model_validate_json, data)
    if found.version > RECORD_VERSION:
        raise RecordCorrupt(key, f"version {found.version} is newer than {RECORD_VERSION}; use a newer agent-rollouts")
    return found


async def read_abort(store: Store) -> dict[str, Any] | None:
    """Return `{reason, message, time}` of an aborted run from its own store; None if it was not aborted."""
    data = await store.get("abort.json")
    if data is None:
        return None
    found = parsed_json("abort.json", data)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        raise RecordCorrupt("abort.json", "it has no message")
    return found


async def read_attempt_numbers(store: Store, index: int) -> list[int]:
    """Return the attempts of a rollout below a run's folder, in order."""
    return sorted(int(folder) for folder in await store.folders(f"attempts/{index}") if folder.isdigit())


def manifest_changes(existing: JobFile, job: RolloutJob) -> list[str]:
    """Return how a job differs from that of a run, except tasks from files: lines `field: old → new`."""
    # Parse it with the current models, so that a field added by a newer version does not count as a change.
    before = RolloutJob.model_validate(existing.manifest).wire()["spec"]
    return differences(_fixed(before), _fixed(job.wire()["spec"]), "spec")


def _changes(existing: JobFile, job: RolloutJob, tasks: TaskList | None) -> list[str]:
    changes = manifest_changes(existing, job)
    if not changes and tasks is not None and tasks != existing.tasks:
        if (existing.tasks.count, existing.tasks.names) != (tasks.count, tasks.names):
            changes = differences(existing.tasks.names, tasks.names, "tasks")
        else:
            changes = [f"tasks: their content changed (digest {existing.tasks.digest[:12]} → {tasks.digest[:12]})"]
    return changes


def _fixed(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in spec.items() if field not in MUTABLE_FIELDS}


def task_list(tasks: Sequence[Task]) -> TaskList:
    """Return a run's record of its tasks."""
    digest = hashlib.sha256()
    for task in tasks:
        # Without defaults, because a later version has more fields.
        fields = task.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        digest.update(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return TaskList(count=len(tasks), digest=digest.hexdigest(), names=[task.name for task in tasks])


def parsed_json(key: str, data: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise RecordCorrupt(key, f"it is not JSON ({error})") from error
    return value
