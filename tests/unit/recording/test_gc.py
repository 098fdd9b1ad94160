"""Deletion cannot be undone: only whole runs that match the rule are deleted, and never a live one."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.gc import LIVE_SECONDS, Run, collect, delete_run, list_runs, plan
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.store import StorageError, Store
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task

MakeJob = Callable[..., RolloutJob]
NOW = 1_000_000.0


def run(
    folder: str,
    *,
    days_old: float,
    finished: bool = True,
    sealed: bool = True,
    aborted: bool = False,
    name: str = "fix",
) -> Run:
    time = NOW - days_old * 24 * 3600
    return Run(folder, name, time, time, objects=1, bytes=1, finished=finished, sealed=sealed, aborted=aborted)


# The folder of a copy may look like that of a run: a date such as 20260131 has eight digits too.
COPIES = ("backup", "ffffffff")


runs = st.lists(
    st.builds(
        run,
        st.uuids().map(str),
        days_old=st.floats(0, 30),
        finished=st.booleans(),
        sealed=st.booleans(),
        aborted=st.booleans(),
        name=st.sampled_from(["fix", "other"]),
    ),
    max_size=8,
)


@given(runs, st.none() | st.floats(0, 30), st.none() | st.integers(0, 5))
def test_every_run_gets_one_decision_and_live_runs_are_never_deleted(
    found: list[Run], days: float | None, newest: int | None
) -> None:
    age = None if days is None else days * 24 * 3600
    decided = plan(found, now=NOW, older_than_seconds=age, keep_newest=newest)
    assert sorted(each.folder for group in (decided.delete, decided.keep, decided.spared) for each in group) == sorted(
        each.folder for each in found
    )
    assert all(each.finished or NOW - each.last_write >= LIVE_SECONDS for each in decided.delete)
    if age is not None:
        assert all(NOW - each.last_write > age for each in decided.delete)
    if newest is not None:
        for name in ("fix", "other"):
            of_name = sorted((e for e in found if e.name == name), key=lambda e: (e.created, e.folder), reverse=True)
            with_results = [each for each in of_name if each.sealed and not each.aborted]
            assert not {*of_name[:newest], *with_results[:newest]} & set(decided.delete)
    if age is None and newest is None:
        assert not decided.delete


@pytest.mark.parametrize("suffix", COPIES)
async def test_copy_beside_its_run_is_deleted_first(
    folder: Store, make_job: MakeJob, tasks: list[Task], tmp_path: Path, suffix: str
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.store.put("seals/0.json", b"{}")
    shutil.copytree(tmp_path / "out" / record.folder, tmp_path / "out" / f"fix-{suffix}")
    await record.store.put("results.jsonl", b"")
    decided = plan(await list_runs(folder), now=NOW, keep_newest=1)
    assert [each.folder for each in decided.keep] == [record.folder]


def test_copy_of_the_newest_run_is_not_counted_as_one_of_the_newest() -> None:
    newest, older = run("fix-2", days_old=2), run("fix-1", days_old=3)
    copy = replace(newest, folder="backup", is_copy=True)
    decided = plan([newest, copy, older], now=NOW, keep_newest=2)
    assert {each.folder for each in decided.keep} >= {"fix-1", "fix-2"}


async def test_run_without_a_finished_rollout_does_not_replace_one_with_results(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    for is_empty in (False, False, True):
        record = await JobRecord.open(folder, make_job(), tasks, new=True)
        await record.store.put("groups/0" if is_empty else "seals/0.json", b"{}")
    oldest, *newer = await list_runs(folder)
    later = newer[-1].last_write + 2 * LIVE_SECONDS
    assert plan([oldest, *newer], now=later, keep_newest=1).delete == (oldest,)


async def test_run_that_is_being_resumed_is_not_deleted(
    folder: Store, make_job: MakeJob, tasks: list[Task], tmp_path: Path
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    os.utime(tmp_path / "out" / record.folder / "job.json", (NOW, NOW))
    (listed,) = await list_runs(folder)
    assert (await JobRecord.open(folder, make_job(), tasks)).resumed
    assert not await delete_run(folder, listed)
    assert [each.folder for each in (await collect(folder, keep_newest=0, dry_run=False)).spared] == [record.folder]


async def test_run_that_was_deleted_before_its_resume_begins_starts_anew(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    await JobRecord.open(folder, make_job(), tasks)
    resumed = await JobRecord.find(folder, make_job(), tasks)
    (listed,) = await list_runs(folder)
    assert await delete_run(folder, listed)
    await resumed.begin()
    assert not resumed.resumed
    assert len(await list_runs(folder)) == 1


async def test_dry_run_deletes_nothing_and_reports_what_would_be_deleted(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.finish(0)
    decided = await collect(folder, keep_newest=0)
    assert [each.folder for each in decided.delete] == [record.folder]
    assert decided.delete[0].bytes > 0
    assert len(await list_runs(folder)) == 1


async def test_only_runs_are_deleted(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.finish(0)
    await folder.put("layers/abc.tar.zst", b"layer")
    await folder.put("mine/notes.txt", b"notes")
    decided = await collect(folder, keep_newest=0, dry_run=False)
    assert [each.folder for each in decided.delete] == [record.folder]
    assert sorted(meta.key for meta in await folder.list("")) == ["layers/abc.tar.zst", "mine/notes.txt"]


async def test_deletion_that_storage_refuses_halfway_is_repeated_by_the_next_gc(
    folder: Store, make_job: MakeJob, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.finish(0)
    delete = Store.delete

    async def refuses_results(store: Store, keys: Sequence[str]) -> None:
        # As S3 answers one request: each object is deleted or refused by itself.
        await delete(store, [key for key in keys if not key.endswith("results.jsonl")])
        if any(key.endswith("results.jsonl") for key in keys):
            raise StorageError("results.jsonl: AccessDenied")

    with monkeypatch.context() as refused:
        refused.setattr(Store, "delete", refuses_results)
        with pytest.raises(StorageError):
            await collect(folder, keep_newest=0, dry_run=False)
    decided = await collect(folder, keep_newest=0, dry_run=False)
    assert [each.folder for each in decided.delete] == [record.folder]
    assert await folder.list("") == []


async def test_gc_deletes_nothing_behind_a_link(
    folder: Store, make_job: MakeJob, tasks: list[Task], tmp_path: Path
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.finish(0)
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    (mine / "deep" / "precious").write_text("precious")
    shutil.copytree(tmp_path / "out" / record.folder, mine / "run")
    (tmp_path / "out" / record.folder / "attempts").mkdir(exist_ok=True)
    (tmp_path / "out" / record.folder / "attempts" / "9").symlink_to(mine)
    (tmp_path / "out" / "fix-00000000").symlink_to(mine / "run")
    before = sorted(mine.rglob("*"))
    decided = await collect(folder, keep_newest=0, dry_run=False)
    assert sorted(mine.rglob("*")) == before
    assert {each.folder for each in decided.spared} == {record.folder, "fix-00000000"}


async def test_after_a_deletion_the_name_can_be_used_again(folder: Store, make_job: MakeJob, tasks: list[Task]) -> None:
    await (await JobRecord.open(folder, make_job(), tasks)).finish(0)
    await collect(folder, keep_newest=0, dry_run=False)
    assert await folder.folders() == []
    assert not (await JobRecord.open(folder, make_job(), tasks)).resumed


async def test_rest_of_an_interrupted_deletion_blocks_no_run(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.store.put("seals/0.json", b"{}")
    await record.store.delete(["job.json"])
    assert not (await JobRecord.open(folder, make_job(), tasks)).resumed


async def test_a_run_with_recent_writes_is_spared_although_the_rule_would_delete_it(
    folder: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    decided = await collect(folder, keep_newest=0, dry_run=False)
    assert [each.folder for each in decided.spared] == [record.folder]
    assert await record.store.get("job.json")


async def test_run_that_was_written_after_the_listing_is_kept(
    folder: Store, make_job: MakeJob, tasks: list[Task], tmp_path: Path
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    listed = (await list_runs(folder))[0]
    await record.store.put("seals/0.json", b"{}")
    os.utime(tmp_path / "out" / record.folder / "seals/0.json", (listed.last_write + 5, listed.last_write + 5))
    assert not await delete_run(folder, listed)
    assert await record.store.get("seals/0.json") == b"{}"


@pytest.mark.parametrize("damaged", [b"", b"not json", b'{"version":1}'])
async def test_folder_of_a_damaged_run_is_not_listed(
    folder: Store, make_job: MakeJob, tasks: list[Task], damaged: bytes
) -> None:
    record = await JobRecord.open(folder, make_job(), tasks)
    await record.store.put("job.json", damaged)
    assert await list_runs(folder) == []
