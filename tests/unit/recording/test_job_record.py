"""A run starts once, is resumed only with the same manifest and tasks, and ends only when it is complete."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.recording.gc import list_runs, plan
from agent_runtime.recording.job_record import (
    JobRecord,
    ManifestChanged,
    NameTaken,
    existing_run,
    read_abort,
    task_list,
)
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError, StorageUnavailable, Store
from rollout_api.records import Result, Seal
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task

MakeJob = Callable[..., RolloutJob]
MakeResult = Callable[..., Result]
UID = "0d5c1c36-87a2-4f0e-9a53-1f3f6f2c7d11"


async def seal(record: JobRecord, result: Result) -> None:
    await record.store.create(f"seals/{result.index}.json", Seal(result=result, objects=[]).model_dump_json().encode())


async def test_equal_manifest_continues_its_newest_run(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    first = await JobRecord.open(folder, make_job(), tasks)
    other = await JobRecord.open(folder, make_job(), tasks, new=True)
    again = await JobRecord.open(folder, make_job(), tasks)
    assert (first.resumed, other.resumed, again.resumed) == (False, False, True)
    assert first.folder != other.folder == again.folder
    assert again.uid == other.uid


async def test_damaged_run_does_not_prevent_a_new_one(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    damaged = await JobRecord.open(folder, make_job(), tasks)
    await folder.put(f"{damaged.folder}/job.json", b"{")
    with pytest.raises(RecordCorrupt, match=r"job\.json"):
        await JobRecord.open(folder, make_job(), tasks)
    new = await JobRecord.open(folder, make_job(), tasks, new=True)
    assert new.folder != damaged.folder


async def test_older_run_is_resumed_by_its_manifest_after_a_new_run_of_another(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    whole = await JobRecord.open(folder, make_job(), tasks)
    limited = make_job(tasks={"inline": [tasks[0].wire()]})
    part = await JobRecord.open(folder, limited, tasks[:1], new=True)
    for job, listed, record in ((make_job(), tasks, whole), (limited, tasks[:1], part)):
        assert (await JobRecord.open(folder, job, listed)).folder == record.folder
        standing = await existing_run(folder, job)
        assert standing is not None
        assert standing.uri == record.store.uri
    with pytest.raises(ManifestChanged, match=part.folder):
        await JobRecord.open(folder, make_job(agent={"type": "Nop", "maxTurns": 7}), tasks)


async def test_copy_and_renamed_run_are_not_resumed(
    folder: Store, make_job: MakeJob, tasks: list[Task], tmp_path: Path
) -> None:
    run, copy = await JobRecord.open(folder, make_job(), tasks), tmp_path / "out" / "fix-ffffffff"
    shutil.copytree(tmp_path / "out" / run.folder, copy)
    standing = await existing_run(folder, make_job())
    assert standing is not None
    assert standing.uri == run.store.uri
    shutil.rmtree(tmp_path / "out" / run.folder)
    assert (await JobRecord.open(folder, make_job(), tasks)).uid != run.uid


async def test_new_run_is_the_newest_when_the_clock_was_set_back(
    folder: Store, make_job: MakeJob, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.recording.job_record.time.time", lambda: 2_000_000_000.0)
    await JobRecord.open(folder, make_job(), tasks)
    monkeypatch.setattr("agent_runtime.recording.job_record.time.time", lambda: 1_999_990_000.0)
    new = await JobRecord.open(folder, make_job(), tasks, new=True)
    assert (await JobRecord.open(folder, make_job(), tasks)).folder == new.folder
    await new.store.put("seals/0.json", b"{}")
    assert [run.folder for run in plan(await list_runs(folder), now=2e9, keep_newest=1).keep] == [new.folder]


async def test_find_writes_nothing_so_a_failed_start_leaves_no_run(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    began = await JobRecord.open(folder, make_job(), tasks)
    failed = await JobRecord.find(folder, make_job(), tasks, new=True)
    assert failed.folder not in await folder.folders()
    assert (await JobRecord.find(folder, make_job(), tasks)).folder == began.folder


async def test_a_changed_manifest_is_refused_with_the_field_and_both_values(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    await JobRecord.open(folder, make_job(), tasks)
    with pytest.raises(ManifestChanged, match=r"spec.agent.maxTurns: 30 → 7\n.*--new") as refused:
        await JobRecord.open(folder, make_job(agent={"type": "Nop", "maxTurns": 7}), tasks)
    assert refused.value.changes == ("spec.agent.maxTurns: 30 → 7",)


async def test_a_source_whose_tasks_changed_is_refused(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    job = make_job(tasks={"from": {"uri": "tasks.jsonl"}})
    await JobRecord.open(folder, job, tasks)
    with pytest.raises(ManifestChanged, match="tasks: 2 entries → 1 entry"):
        await JobRecord.open(folder, job, tasks[:1])
    with pytest.raises(ManifestChanged, match='tasks\\[0\\]: "first" → "second"'):
        await JobRecord.open(folder, job, tasks[::-1])
    with pytest.raises(ManifestChanged, match="tasks: their content changed"):
        await JobRecord.open(folder, job, [tasks[0], tasks[1].model_copy(update={"prompt": "do more"})])


async def test_run_whose_name_starts_like_another_is_another_run(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    await JobRecord.open(folder, make_job("fix-12345678"), tasks)
    assert not (await JobRecord.open(folder, make_job("fix"), tasks)).resumed


async def test_all_runners_of_a_job_open_one_run(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    records = await asyncio.gather(*(JobRecord.open(folder, make_job(uid=UID), tasks) for _ in range(8)))
    assert {record.folder for record in records} == {f"fix-{UID[:8]}"}
    assert await folder.folders() == [f"fix-{UID[:8]}"]


async def test_folder_of_another_job_is_never_written_to(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    await JobRecord.open(folder, make_job(uid=UID), tasks)
    with pytest.raises(NameTaken, match="another name"):
        await JobRecord.open(folder, make_job(uid=UID[:-1] + "2"), tasks)


async def test_seals_are_read_by_index_and_a_damaged_one_is_named(record: JobRecord, make_result: MakeResult) -> None:
    for index in (10, 9, 0):
        await seal(record, make_result(index))
    assert list(await record.seals()) == [0, 9, 10]
    await record.store.put("seals/9.json", b'{"version":1}')
    with pytest.raises(RecordCorrupt, match=r"seals/9.json: result: "):
        await record.seals()
    await record.store.put("seals/9.json", Seal(result=make_result(8), objects=[]).model_dump_json().encode())
    with pytest.raises(RecordCorrupt, match=r"seals/9.json: it seals rollout 8"):
        await record.seals()


async def test_first_reason_to_abort_is_kept(record: JobRecord) -> None:
    assert await read_abort(record.store) is None
    await record.abort("InfraFailures", "too many")
    await record.abort("Other", "later")
    aborted: dict[str, Any] = await read_abort(record.store) or {}
    assert (aborted["reason"], aborted["message"]) == ("InfraFailures", "too many")


async def test_results_are_written_only_when_all_shards_have_ended(record: JobRecord, make_result: MakeResult) -> None:
    await seal(record, make_result(1, reward=0.0, passed=False))
    await seal(record, make_result(0))
    await record.finish_shard(1, {"sealed": 1})
    assert not await record.finish(2)
    assert await record.store.get("results.jsonl") is None
    await record.finish_shard(0, {"sealed": 1})
    stats = await record.finish(2)
    lines = (await record.store.get("results.jsonl") or b"").splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    assert stats is not None
    assert stats["reward"]["mean"] == 0.5


async def test_finished_rollouts_that_storage_has_lost_are_told(record: JobRecord, make_result: MakeResult) -> None:
    await seal(record, make_result(0))
    await record.finish_shard(0, {"sealed": 2})
    with pytest.raises(StorageError, match="1 of 2 finished rollouts are missing"):
        await record.finish(1)
    assert await record.store.get("results.jsonl") is None


async def test_folder_of_a_run_that_goes_away_is_not_made_again(
    folder: Store, record: JobRecord, tmp_path: Path
) -> None:
    """Otherwise a run on a mount that is away for a moment ends well, and half of its rollouts are under the mount."""
    written = replace(record.store, patience_seconds=5)
    home, away = tmp_path / "out" / record.folder, tmp_path / "away"
    home.rename(away)
    with pytest.raises(StorageUnavailable, match="moved, deleted or unmounted"):
        await replace(written, patience_seconds=0).create("seals/0.json", b"{}")
    waiting = asyncio.create_task(written.put("health.json", b"{}"))
    await asyncio.sleep(0.1)
    assert not home.exists()
    away.rename(home)
    await waiting


def test_field_that_a_later_version_adds_with_a_default_changes_no_task() -> None:
    minimal = json.dumps({"name": "t", "prompt": "p"}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert task_list([Task(name="t", prompt="p")]).digest == hashlib.sha256(minimal).hexdigest()
