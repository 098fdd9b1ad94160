"""Many runners may believe that they hold an attempt. In any order of their requests, no acknowledged record may be
lost, and no superseded runner may get a confirmation of a write.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from agent_runtime.recording.job_record import JobFile, JobRecord, task_list
from agent_runtime.recording.journal import AlreadySealed, Journal, Superseded
from agent_runtime.recording.reader import read_attempt
from agent_runtime.recording.store import Contents, Listing, Store
from rollout_api.records import Record, StopReason, StopRecord
from tests.support.full import examples
from tests.support.records import completed, small_job


class Steps:
    """Lets one runner at a time take one step: up to the next moment before or after a storage request."""

    def __init__(self) -> None:
        self._parked: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()

    async def pause(self, name: str) -> None:
        self._parked[name] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            await self._parked[name]
        finally:
            self._parked.pop(name, None)

    async def drive(self, tasks: dict[str, "asyncio.Task[None]"], schedule: list[tuple[int, int, bool]]) -> None:
        """Run all coroutines to their end. Each entry selects which one continues, for how many steps, and whether it
        is then killed.
        """
        for task in tasks.values():
            task.add_done_callback(lambda _: self._changed.set())
        names = list(tasks)
        turns = (
            (names[pick % len(names)], kill and step == count)
            for pick, count, kill in schedule
            for step in range(1, count + 1)
        )
        while True:
            while alive := [name for name, task in tasks.items() if not task.done()]:
                if len(self._parked) == len(alive):
                    break
                self._changed.clear()
                await self._changed.wait()
            if not alive:
                return
            name, kill = next(turns, (alive[0], False))
            if name not in alive:
                continue
            gate = self._parked.pop(name)
            if kill:
                tasks[name].cancel()
            else:
                gate.set_result(None)
            await asyncio.sleep(0)


@dataclass(frozen=True)
class SteppedStore(Store):
    """A store in memory that stops before and after each request."""

    steps: Steps = field(default_factory=Steps)
    runner: str = ""

    async def create(self, key: str, data: bytes) -> bool:
        await self.steps.pause(self.runner)
        created = await super().create(key, data)
        await self.steps.pause(self.runner)
        return created

    async def list(self, prefix: str) -> Listing:
        found = await super().list(prefix)
        await self.steps.pause(self.runner)
        return found

    async def delete(self, keys: Any) -> None:
        for key in keys:  # storage may delete them in any order, and a reader may see it half done
            await super().delete([key])
            await self.steps.pause(self.runner)

    async def get_all(self, keys: Any) -> Contents:
        found = await super().get_all(keys)
        await self.steps.pause(self.runner)
        return found


JOB = small_job()
JOB_FILE = JobFile(uid="0", created=0, manifest=JOB.wire(), tasks=task_list([]))


def note(text: str) -> StopRecord:
    return StopRecord(time=0, stop_reason=StopReason.FINISHED, message=text)


def texts(records: list[Record]) -> list[str]:
    return [record.message for record in records if isinstance(record, StopRecord)]


@dataclass
class Runner:
    """The answers that one runner got."""

    epoch: int = 0
    seen: list[str] | None = None
    """The records that counted when it began."""
    acknowledged: list[str] = field(default_factory=list)
    sealed: str | None = None


async def work(record: JobRecord, name: str, told: Runner, seals: bool) -> None:
    try:
        journal = await Journal.claim(record, 0, 0)
        told.epoch = journal.epoch
        await journal.peek()
        told.seen = texts(await journal.begin())
        for number in range(3):
            text = f"{name}{number}"
            await journal.append([note(text)])
            told.acknowledged.append(text)
        if seals:
            told.sealed = (await journal.seal(completed(task="a", message=name), None, [])).message
    except AlreadySealed as sealed:
        told.sealed = sealed.result.message
    except Superseded:
        return


@settings(max_examples=examples(150))
@given(
    runners=st.integers(2, 4),
    seals=st.booleans(),
    schedule=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 15), st.integers(0, 9).map(lambda n: n == 9)), max_size=30
    ),
)
async def test_no_acknowledged_record_is_lost_in_any_order_of_takeovers(
    runners: int, seals: bool, schedule: list[tuple[int, int, bool]]
) -> None:
    steps, objects = Steps(), MemoryStore()
    told = {name: Runner() for name in "abcd"[:runners]}
    tasks = {
        name: asyncio.create_task(
            work(
                JobRecord(SteppedStore("memory:", objects, steps=steps, runner=name), "fix-0", JOB, JOB_FILE),
                name,
                it,
                seals,
            )
        )
        for name, it in told.items()
    }
    await steps.drive(tasks, schedule)
    for task in tasks.values():
        if not task.cancelled():
            task.result()

    record = JobRecord(Store("memory:", objects), "fix-0", JOB, JOB_FILE)
    final = texts(await read_attempt(record.store, 0, 0))
    sealed = {it.sealed for it in told.values() if it.sealed}
    assert len(sealed) <= 1, "two runners believe in two seals"
    epochs = [it.epoch for it in told.values() if it.epoch]
    assert len(set(epochs)) == len(epochs), "two runners hold the same epoch"
    assert len(set(final)) == len(final), "a record counts twice"
    writers = {text: told[text[0]].epoch for text in final}
    assert list(writers.values()) == sorted(writers.values()), "an older epoch's record follows a newer one's"
    for name, it in told.items():
        if any(it.epoch > told[sealer].epoch for sealer in sealed):
            continue  # claimed after the sealer had checked that nobody did
        mine = [text for text in final if text[0] == name]
        assert mine[: len(it.acknowledged)] == it.acknowledged, "an acknowledged record is lost"
        assert len(mine) <= len(it.acknowledged) + 1, "only the append that was under way may be there unacknowledged"
        if it.seen is not None:
            assert final[: len(it.seen)] == it.seen, "what counted for an epoch does not count any more"
            assert all(told[text[0]].epoch >= it.epoch for text in final[len(it.seen) :]), "a late writer got through"


async def test_two_runners_that_claim_at_once_get_different_epochs(record: JobRecord) -> None:
    journals = await asyncio.gather(*(Journal.claim(record, 0, 0) for _ in range(8)))
    assert sorted(journal.epoch for journal in journals) == list(range(1, 9))


async def test_superseded_runner_can_append_nothing(record: JobRecord) -> None:
    frozen = await Journal.claim(record, 0, 0)
    await frozen.begin()
    await frozen.append([note("before")])

    successor = await Journal.claim(record, 0, 0)
    assert texts(await successor.peek()) == ["before"]
    await frozen.append([note("between")])
    assert texts(await successor.begin()) == ["before", "between"]

    with pytest.raises(Superseded, match="rollout 0, attempt 0, epoch 1"):
        await frozen.append([note("after")])
    await successor.append([note("next")])
    assert texts(await read_attempt(record.store, 0, 0)) == ["before", "between", "next"]


async def test_a_runner_that_was_superseded_cannot_seal(record: JobRecord) -> None:
    """It may have lost what its successor still has: its grading sandbox, or its model server."""
    frozen = await Journal.claim(record, 0, 0)
    await frozen.begin()
    successor = await Journal.claim(record, 0, 0)
    with pytest.raises(Superseded, match="epoch 2 is claimed"):
        await frozen.seal(completed(task="a", message="frozen"), None, [])
    await successor.begin()
    assert (await successor.seal(completed(task="a", message="successor"), None, [])).message == "successor"


@dataclass(frozen=True)
class InterruptedStore(Store):
    """Calls a function just before a key is written."""

    key: str = ""
    interruption: Callable[[], Awaitable[None]] | None = None

    async def create(self, key: str, data: bytes) -> bool:
        if key == self.key and self.interruption is not None:
            await self.interruption()
        return await super().create(key, data)


async def test_a_segment_that_arrives_while_its_epoch_is_being_closed_counts(memory: Store) -> None:
    first = await Journal.claim(JobRecord(memory, "fix-0", JOB, JOB_FILE), 0, 0)
    await first.begin()
    await first.append([note("a")])

    async def arrive() -> None:
        await first.append([note("just in time")])

    interrupted = InterruptedStore(memory.uri, memory.objects, key="attempts/0/0/1-1.jsonl.zst", interruption=arrive)
    second = await Journal.claim(JobRecord(interrupted, "fix-0", JOB, JOB_FILE), 0, 0)
    assert texts(await second.begin()) == ["a", "just in time"]
    with pytest.raises(Superseded):
        await first.append([note("too late")])


async def test_a_runner_that_was_overtaken_between_claim_and_begin_gives_up(record: JobRecord) -> None:
    await Journal.claim(record, 0, 0)
    slow = await Journal.claim(record, 0, 0)
    fast = await Journal.claim(record, 0, 0)
    await fast.begin()
    with pytest.raises(Superseded, match="epoch 3"):
        await slow.begin()


async def test_start_of_an_epoch_names_the_epochs_that_it_continues(record: JobRecord) -> None:
    first = await Journal.claim(record, 0, 0)
    await first.begin()
    await first.append([note("a")])
    await first.append([note("b")])
    second = await Journal.claim(record, 0, 0)
    await second.begin()
    start = await record.store.get("attempts/0/0/epoch-2.start.json")
    assert start is not None
    assert b'"follows":{"1":2}' in start
