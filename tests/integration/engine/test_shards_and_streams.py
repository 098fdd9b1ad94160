"""A job that several runners share, an open job, and a job that is asked to stop: nothing is lost or done twice.

Whole runs of the engine over an in-memory provider, recorded in a real folder.
"""

import asyncio
import contextlib
import itertools
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.base import AgentContext
from agent_runtime.engine.events import JobSummary
from agent_runtime.engine.groups import Groups, JobAborted
from agent_runtime.engine.run import run_job
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.engine.session import RolloutSession
from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.plugins.base import GroupInfo
from agent_runtime.recording import gc
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.reader import NoTokenIds
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageUnavailable, Store
from agent_runtime.recording.stream import Feed, StreamClosed, StreamRecord
from agent_runtime.sandboxes.base import SandboxFailure
from rollout_api.records import Outcome, Result, StopReason, Usage
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task
from tests.support.dummy_sandboxes import DummyProvider

UID = str(uuid.uuid4())
"""Differs between processes, because a run is locked by its uid on the whole machine."""
worlds = itertools.count()


class Commands:
    """Requests `turns` commands, then finishes; answers after `seconds`. Counts its calls by rollout and turn."""

    name, token_capture = "commands", "TextOnly"

    def __init__(self, turns: int = 1, seconds: float = 0.0) -> None:
        self.turns, self.seconds = turns, seconds
        self.asked: list[tuple[str, int, int]] = []
        self.asked_ten_times = asyncio.Event()

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.asked.append((request.task, request.member, request.turn))
        if len(self.asked) == 10:
            self.asked_ten_times.set()
        await asyncio.sleep(self.seconds)
        last = request.turn == self.turns
        name, arguments = ("finish", '{"message": "done"}') if last else ("bash", '{"command": "true"}')
        call = {"id": f"c{request.turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return ModelReply(message, "tool_calls", usage=Usage(prompt_tokens=1, completion_tokens=1))

    async def check(self) -> None: ...

    async def close(self) -> None: ...


def a_task(number: int) -> dict[str, Any]:
    return {"name": f"task-{number}", "prompt": "Do it.", "verifier": {"commands": ["grade"]}}


def a_result(group: int) -> Result:
    return Result(
        index=group, group=group, member=0, task="t", mode="Eval", seed=0, outcome=Outcome.COMPLETED, attempt=0
    )


@pytest.fixture
def overtaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a store whose writes overtake one another, in requests and in replies."""
    create, delays = Store.create, itertools.cycle([0.03, 0.0, 0.02, 0.01, 0.0])

    async def slow(self: Store, key: str, data: bytes) -> bool:
        await asyncio.sleep(next(delays))
        created = await create(self, key, data)
        await asyncio.sleep(next(delays))
        return created

    monkeypatch.setattr(Store, "create", slow)


def a_job(folder: Path, tasks: dict[str, Any], **spec: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "shared", "uid": UID},
            "spec": {
                "mode": "Eval",
                "groupSize": 2,
                "tasks": tasks,
                "model": {"function": "nobody:asks"},
                "agent": {"tools": ["bash", "finish"]},
                "attempts": {"limit": 1, "backoffSeconds": 0},
                "output": {"uri": str(folder)},
                **spec,
            },
        }
    )


def listed(count: int) -> dict[str, Any]:
    return {"inline": [a_task(number) for number in range(count)]}


async def run_shard(job: RolloutJob, shard: Shard, model: Commands, **options: Any) -> JobSummary:
    world = options.pop("world", f"shards-{next(worlds)}")
    return await run_job(
        job, base_dir=Path("/"), environ={}, provider=DummyProvider(world), model=model, shard=shard, **options
    )


def indexes(folder: Path) -> list[int]:
    lines = (folder / f"shared-{UID[:8]}" / "results.jsonl").read_text().splitlines()
    return [json.loads(line)["index"] for line in lines]


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_runners_share_a_job_and_the_last_writes_all_results(tmp_path: Path, count: int) -> None:
    job, model = a_job(tmp_path, listed(4)), Commands()
    summaries = await asyncio.gather(*(run_shard(job, Shard(index, count), model) for index in range(count)))
    assert all(summary.completed for summary in summaries)
    assert sum(summary.total for summary in summaries) == 8
    assert indexes(tmp_path) == list(range(8))
    assert len(model.asked) == len(set(model.asked)) == 16


class DeletesOldRuns(Commands):
    """Runs `gc` while the model is checked."""

    def __init__(self, output: Path) -> None:
        super().__init__()
        self._output = output

    async def check(self) -> None:
        await gc.collect(Store.open(str(self._output), {}), older_than_seconds=gc.LIVE_SECONDS, dry_run=False)


async def test_old_run_is_not_deleted_while_a_resume_checks_the_model(tmp_path: Path) -> None:
    job = a_job(tmp_path, listed(2))
    assert (await run_shard(job, Shard(1, 2), Commands())).completed
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    assert (await run_shard(job, Shard(0, 2), DeletesOldRuns(tmp_path))).completed
    assert indexes(tmp_path) == list(range(4))


async def test_a_runner_that_comes_back_after_the_others_ended_writes_the_results(tmp_path: Path) -> None:
    job, model = a_job(tmp_path, listed(4)), Commands()
    assert (await run_shard(job, Shard(1, 2), model)).completed
    assert not list(tmp_path.glob("*/results.jsonl"))
    assert (await run_shard(job, Shard(0, 2), model)).completed
    assert indexes(tmp_path) == list(range(8))
    assert (await run_shard(job, Shard(1, 2), model)).completed, "a restarted pod finds its shard done"
    assert len(model.asked) == 16


async def test_job_aborted_by_one_runner_is_continued_by_none(tmp_path: Path) -> None:
    job, model = a_job(tmp_path, listed(6)), Commands()
    folder = tmp_path / f"shared-{UID[:8]}"
    folder.mkdir()
    (folder / "abort.json").write_text(json.dumps({"reason": "InfraFailures", "message": "8 of 20", "time": 0}))
    summary = await run_shard(job, Shard(0, 2), model)
    assert summary.aborted is not None
    assert "8 of 20" in summary.aborted
    assert not model.asked


async def test_open_job_accepts_groups_until_it_is_closed_and_returns_each_once(tmp_path: Path) -> None:
    job, model = a_job(tmp_path, {"stream": {"maxInFlight": 4}}), Commands()
    shards = [asyncio.create_task(run_shard(job, Shard(index, 2), model)) for index in range(2)]
    record = StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {}))
    for step in range(2):
        numbers = [await record.submit(Task.model_validate(a_task(0)), label=f"step-{step}") for _ in range(3)]
        assert numbers == [3 * step, 3 * step + 1, 3 * step + 2]
        while sum([len(await record.published_groups(shard)) for shard in range(2)]) < 3 * step + 3:
            assert not any(shard.done() for shard in shards)
            await asyncio.sleep(0.02)
    assert await record.close() == 6
    assert [(await shard).completed for shard in shards] == [True, True]
    assert indexes(tmp_path) == list(range(12))
    assert (set(await record.published_groups(0)), set(await record.published_groups(1))) == ({0, 2, 4}, {1, 3, 5})
    with pytest.raises(StreamClosed, match="6 groups"):
        await StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {})).submit(Task.model_validate(a_task(9)))


class QuotesAFileName:
    """An agent whose error quotes the name of a file, which has a byte that is not UTF-8."""

    async def run(self, context: AgentContext) -> str:
        await context.call_model([{"role": "user", "content": context.task.prompt}])
        raise ValueError("cannot read " + b"caf\xe9".decode(errors="surrogateescape"))


async def test_open_job_continues_after_an_error_with_invalid_utf_8(tmp_path: Path) -> None:
    job = a_job(tmp_path, {"stream": {}})
    shard = asyncio.create_task(run_shard(job, Shard(0, 1), Commands(), agent=QuotesAFileName))
    record = StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {}))
    await record.submit(Task.model_validate(a_task(0)))
    await record.close()
    assert (await shard).completed
    fed = await record.published_group(0, 0)
    assert fed is not None
    assert [(result.stop_reason, result.message) for result in fed.results] == [
        (StopReason.AGENT_ERROR, "ValueError: cannot read caf?")
    ] * 2


async def test_open_job_completes_when_a_submit_follows_the_close_of_another_client(tmp_path: Path) -> None:
    job = a_job(tmp_path, {"stream": {"maxInFlight": 4}})
    shards = [asyncio.create_task(run_shard(job, Shard(index, 2), Commands())) for index in range(2)]
    store = Store.open(str(tmp_path / f"shared-{UID[:8]}"), {})
    trainer, other = StreamRecord(store), StreamRecord(store)
    task = Task.model_validate(a_task(0))
    assert await trainer.submit(task) == 0
    assert await other.close() == 1
    for record in (trainer, other):
        with pytest.raises(StreamClosed, match="1 groups"):
            await record.submit(task)
    assert await trainer.close() == 1
    async with asyncio.timeout(30):
        summaries = [await shard for shard in shards]
    assert [(summary.completed, summary.total) for summary in summaries] == [(True, 2), (True, 0)]
    assert indexes(tmp_path) == [0, 1]


@pytest.mark.parametrize("shard", [0, 1])
async def test_open_job_completes_when_its_closing_client_died_half_way(tmp_path: Path, shard: int) -> None:
    job = a_job(tmp_path, {"stream": {"maxInFlight": 4}})
    shards = [asyncio.create_task(run_shard(job, Shard(index, 2), Commands())) for index in range(2)]
    store = Store.open(str(tmp_path / f"shared-{UID[:8]}"), {})
    for _ in range(shard):
        await StreamRecord(store).submit(Task.model_validate(a_task(0)))
    await store.create(f"stream/{shard}.json", b'{"closed":true}')
    async with asyncio.timeout(30):
        assert [(await running).completed for running in shards] == [True, True]


async def test_two_clients_that_submit_the_same_task_get_two_groups(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path), {})
    task = Task.model_validate(a_task(0))
    numbers = await asyncio.gather(*(StreamRecord(store).submit(task) for _ in range(8)))
    assert sorted(numbers) == list(range(8))


@pytest.mark.usefixtures("overtaking")
async def test_concurrent_submits_of_a_client_get_their_own_numbers(tmp_path: Path) -> None:
    record = StreamRecord(Store.open(str(tmp_path), {}))
    tasks = [Task.model_validate(a_task(number)) for number in range(8)]
    numbers = await asyncio.gather(*(record.submit(task, label=task.name) for task in tasks))
    assert sorted(numbers) == list(range(8))
    for number, task in zip(numbers, tasks, strict=True):
        entry = await record.entry(number)
        assert entry is not None
        assert (entry.task, entry.label) == (task, task.name)


@pytest.mark.usefixtures("overtaking")
async def test_groups_that_finish_at_once_are_all_in_the_feed(tmp_path: Path) -> None:
    record = StreamRecord(Store.open(str(tmp_path), {}))
    feed, thawed = Feed(record, 0), Feed(record, 0)
    await feed.open()
    await thawed.open()
    groups = list(range(6))
    await asyncio.gather(*(giver.publish(group, [a_result(group)]) for group in groups for giver in (feed, thawed)))
    fed = [await record.published_group(0, sequence) for sequence in range(7)]
    assert sorted(entry.group for entry in fed if entry is not None) == groups
    assert fed[6] is None


def a_session(folder: Path, model: Commands, most: int = 100, **provided: Any) -> RolloutSession:
    job = a_job(folder, {"stream": {"maxInFlight": most}})
    provider = DummyProvider(f"shards-{next(worlds)}", **provided)
    return RolloutSession(job, base_dir=Path("/"), provider=provider, model=model)


@pytest.mark.usefixtures("overtaking")
async def test_concurrent_tasks_of_a_session_are_returned_as_separate_groups(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands()) as session:
        numbers = await asyncio.gather(*(session.submit(a_task(number), label=f"row {number}") for number in range(8)))
        assert sorted(numbers) == list(range(8))
        await session.close()
        groups = {group.sequence: (group.task, group.label) async for group in session}
    assert groups == {number: (f"task-{row}", f"row {row}") for row, number in enumerate(numbers)}
    record = StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {}))
    assert set(await record.published_groups(0)) == set(range(8))


class FirstIsSlow(Commands):
    """Does not answer for the first task."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        if request.task == "task-0":
            await asyncio.Event().wait()
        return await super().complete(request)


async def test_later_session_returns_finished_groups_in_the_same_order(tmp_path: Path) -> None:
    """A trainer skips as many groups as it has used."""
    async with a_session(tmp_path, FirstIsSlow()) as session:
        for number in range(3):
            await session.submit(a_task(number))
        used = [(await anext(session)).task for _ in range(2)]
    assert sorted(used) == ["task-1", "task-2"]
    async with a_session(tmp_path, Commands()) as session:
        await session.close()
        assert [group.task async for group in session] == [*used, "task-0"]


async def test_tokens_of_a_model_without_token_ids_are_an_error_with_the_reason(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands()) as session:
        await session.submit(a_task(0))
        await session.close()
        groups = [group async for group in session]
        with pytest.raises(NoTokenIds, match="has no token ids, because its model returned none"):
            await session.tokens(groups[0].results[0])


async def test_submit_of_a_session_uses_no_place_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_session(tmp_path, Commands(), most=1) as session:
        other = StreamRecord(Store.open(session.uri, {}))
        await other.submit(Task.model_validate(a_task(0)))
        with monkeypatch.context() as unreadable:

            async def fail(*_: object) -> None:
                raise StorageUnavailable("storage is away")

            unreadable.setattr(StreamRecord, "entry", fail)
            session._stream._next = 1  # so that it does not read the other client's entry before its own is written
            with pytest.raises(StorageUnavailable):
                await session.submit(a_task(1))
        async with asyncio.timeout(60):
            await session.submit(a_task(2))
            await session.close()
            assert {group.task async for group in session} == {"task-0", "task-1", "task-2"}


async def test_session_writes_the_results_when_its_stream_is_closed_and_complete(tmp_path: Path) -> None:
    run = tmp_path / f"shared-{UID[:8]}"
    async with a_session(tmp_path, Commands()) as session:
        await session.submit(a_task(0))
        await anext(session)
    assert not (run / "results.jsonl").exists(), "another session may submit more"
    async with a_session(tmp_path, Commands()) as session:
        await session.submit(a_task(1))
        await session.close()
        assert {group.sequence async for group in session} == {0, 1}
    groups = {json.loads(line)["group"] for line in (run / "results.jsonl").read_text().splitlines()}
    assert groups == {0, 1}
    assert (run / "stats.json").exists()


async def test_older_session_takes_no_group_from_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with contextlib.AsyncExitStack() as sessions:
        older = await sessions.enter_async_context(a_session(tmp_path, Commands()))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other-host"))
        (tmp_path / "other-host").mkdir()
        async with a_session(tmp_path, Commands(seconds=0.3)) as newer:
            await newer.submit(a_task(0))
            await older.submit(a_task(1))
            with pytest.raises(Superseded, match="a later session"):
                await anext(older)
            await newer.close()
            assert {group.sequence async for group in newer} == {0, 1}


async def test_session_does_not_continue_an_aborted_run(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands(seconds=60)) as session:
        await session.submit(a_task(0))
        await session.abandon("Cancelled", "somebody asked for it")
    model = Commands()
    with pytest.raises(JobAborted, match="somebody asked for it"):
        async with a_session(tmp_path, model) as session:
            await session.close()
    assert not model.asked


async def test_session_aborts_its_run_when_too_many_rollouts_are_lost(tmp_path: Path) -> None:
    async def lose(operation: str, attempt: str, key: str | None) -> None:
        raise SandboxFailure("Unschedulable", "no node fits")

    async def train() -> None:
        async with a_session(tmp_path, Commands(), on_call=lose) as session:
            for number in range(12):
                await session.submit(a_task(number))
            async for _ in session:
                pass

    with pytest.raises(JobAborted, match="20 of 20"):
        await train()
    store = Store.open(str(tmp_path / f"shared-{UID[:8]}"), {})
    sealed = {meta.key for meta in await store.list("seals")}
    with pytest.raises(JobAborted, match="20 of 20"):
        async with a_session(tmp_path, Commands(), on_call=lose) as session:
            await anext(session)
    assert {meta.key for meta in await store.list("seals")} == sealed


@pytest.mark.usefixtures("overtaking")
async def test_a_trainer_whose_waits_time_out_loses_no_group_and_no_place(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands(turns=2, seconds=0.02), most=2) as session:
        submitted, finished, row = 0, [], 0
        while row < 12:
            try:
                async with asyncio.timeout(0.05):
                    await session.submit(a_task(row))
            except TimeoutError:
                pass
            try:
                async with asyncio.timeout(0.02):
                    finished.append((await anext(session)).sequence)
            except TimeoutError:
                pass
            row += 1
        await session.close()
        submitted = session.submitted
        async with asyncio.timeout(20):
            finished += [group.sequence async for group in session]
    assert submitted > 0
    assert sorted(finished) == list(range(submitted))


async def test_drained_run_finishes_its_turns_and_resumes(tmp_path: Path) -> None:
    job = a_job(tmp_path, listed(4), runners={"concurrency": 4})
    model, drain, world = Commands(turns=5, seconds=0.05), Drain(), f"shards-{next(worlds)}"
    run = asyncio.create_task(run_shard(job, Shard(), model, drain=drain, world=world))
    await model.asked_ten_times.wait()
    drain.request()
    first = await run
    assert first.resumable
    assert max(turn for _, _, turn in model.asked) < 5, "no rollout was near its end"
    second = await run_shard(job, Shard(), model, world=world)
    assert second.completed
    assert second.outcomes["Completed"] == 8
    assert len(model.asked) == len(set(model.asked)) == 8 * 6, "no turn was lost, none was asked for twice"
    results = (tmp_path / f"shared-{UID[:8]}" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["attempt"] for line in results} == {0}, "a drain uses up no attempt"


class SlowToHear:
    """A plugin that takes long to handle the end of a group."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.told: list[int] = []

    def after_group(self, group: GroupInfo) -> None:
        self.begun.set()
        self.go_on.wait()
        self.told.append(group.number)


async def test_run_stopped_before_its_last_group_is_returned_is_resumable(tmp_path: Path) -> None:
    job, plugin, stop = a_job(tmp_path, {"stream": {}}), SlowToHear(), asyncio.Event()
    record = StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {}))
    await record.submit(Task.model_validate(a_task(0)))
    await record.close()
    run = asyncio.create_task(run_shard(job, Shard(), Commands(), stop=stop, plugins=[plugin]))
    await asyncio.to_thread(plugin.begun.wait)
    stop.set()
    assert (await run).resumable
    plugin.go_on.set()
    resumed = SlowToHear()
    resumed.go_on.set()
    assert (await run_shard(job, Shard(), Commands(), plugins=[resumed])).completed
    assert resumed.told == [0]
    fed = await record.published_group(0, 0)
    assert fed is not None, "whoever follows the stream would wait for this group for ever"


async def test_session_of_a_closed_stream_ends_when_all_groups_are_out(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands()) as session:
        await session.submit(Task.model_validate(a_task(0)))
        await session.close()
        assert [group.sequence async for group in session] == [0]
    async with asyncio.timeout(20), a_session(tmp_path, Commands()) as session:
        assert [group.sequence async for group in session] == [0], "the trainer died before it had this one"
        with pytest.raises(ValueError, match="closed"):
            await session.submit(Task.model_validate(a_task(1)))


class SlowToOpen(DummyProvider):
    """A provider that opens slowly, after existing runs were looked up."""

    async def open(self) -> None:
        await asyncio.sleep(0.05)
        await super().open()


async def test_two_first_starts_of_a_job_at_the_same_time_give_one_run(tmp_path: Path) -> None:
    job = a_job(tmp_path, listed(1))
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": None})})
    model = Commands()
    starts = (
        run_job(job, base_dir=Path("/"), environ={}, provider=SlowToOpen(f"shards-{next(worlds)}"), model=model)
        for _ in range(2)
    )
    ends = await asyncio.gather(*starts, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["JobSummary", "RunInProgress"]
    assert all(end.completed for end in ends if isinstance(end, JobSummary))
    assert len(list(tmp_path.glob("shared-*/job.json"))) == 1
    assert len(model.asked) == len(set(model.asked)), "no rollout ran twice"


@pytest.mark.usefixtures("overtaking")
async def test_groups_submitted_next_to_a_session_are_delivered_once(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands()) as session:
        other = StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {}))
        assert await other.submit(Task.model_validate(a_task(0)), "other") == 0
        assert await session.submit(Task.model_validate(a_task(1)), "own") == 1
        assert await other.submit(Task.model_validate(a_task(2)), "other") == 2
        await session.close()
        async with asyncio.timeout(20):
            assert sorted([(group.sequence, group.label) async for group in session]) == [
                (0, "other"), (1, "own"), (2, "other"),
            ]  # fmt: skip


async def test_session_ends_when_its_stream_is_closed_by_another(tmp_path: Path) -> None:
    async with a_session(tmp_path, Commands()) as session:
        other = StreamRecord(Store.open(str(tmp_path / f"shared-{UID[:8]}"), {}))
        await other.submit(Task.model_validate(a_task(0)))
        await other.close()
        with pytest.raises(StreamClosed, match="1 groups"):
            await session.submit(a_task(1))
        async with asyncio.timeout(20):
            assert [group.sequence async for group in session] == [0]


async def test_damaged_group_of_a_stream_is_named(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path), {})
    await store.create("stream/0.json", b'{"task": 1')
    with pytest.raises(RecordCorrupt, match=r"stream/0\.json: is not a submitted group"):
        await StreamRecord(store).entry(0)


async def test_submission_that_is_stored_after_the_session_is_left_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, start, started = StreamRecord.submit, Groups.start, list[int]()

    async def slow(self: StreamRecord, task: Task, label: str | None = None) -> int:
        await asyncio.sleep(0.2)
        return await submit(self, task, label)

    async def noted(self: Groups, number: int, task: Task) -> None:
        started.append(number)
        await start(self, number, task)

    job, world = a_job(tmp_path, {"stream": {}}), f"stored-later-{next(worlds)}"
    monkeypatch.setattr(StreamRecord, "submit", slow)
    monkeypatch.setattr(Groups, "start", noted)
    async with RolloutSession(job, base_dir=tmp_path, provider=DummyProvider(world), model=Commands()) as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.submit(a_task(0))
    async with asyncio.timeout(60):
        while await StreamRecord(session._context.record.store).numbers() != [0]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert started == []
    async with RolloutSession(job, base_dir=tmp_path, provider=DummyProvider(world), model=Commands()) as session:
        await session.close()
        assert [group.sequence async for group in session] == [0]
