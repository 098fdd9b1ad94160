"""A journal as one runner uses it: appended records are there, and seals stay, also after an interruption."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import (
    DELETE_SECONDS,
    AlreadySealed,
    ArtifactsTooLarge,
    Journal,
    RecordCorrupt,
    Superseded,
)
from agent_runtime.recording.reader import open_run, read_attempt
from agent_runtime.recording.segments import json_bytes
from agent_runtime.recording.store import StorageError, StorageUnavailable, Store
from rollout_api.records import IntentRecord, Outcome, Record, ResponseRecord, Result, StopReason, StopRecord

MakeResult = Callable[..., Result]

TURN: list[Record] = [
    IntentRecord(turn=0, time=1, keep=0, messages=[{"role": "user", "content": "go"}]),
    ResponseRecord(
        turn=0,
        time=2,
        seconds=1,
        message={"role": "assistant", "content": None},
        finish_reason="stop",
        prompt_token_ids=[1, 2],
        completion_token_ids=[3],
        logprobs=[-0.5],
    ),
]


def note(text: str) -> StopRecord:
    return StopRecord(time=0, stop_reason=StopReason.FINISHED, message=text)


async def chunks_of(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 70_000):
        yield data[start : start + 70_000]


async def begun(record: JobRecord, attempt: int = 0) -> Journal:
    journal = await Journal.claim(record, 0, attempt)
    await journal.begin()
    return journal


async def test_appends_that_were_called_together_are_written_in_the_order_of_their_calls(record: JobRecord) -> None:
    journal = await begun(record)
    notes = [note(str(number)) for number in range(20)]
    await asyncio.gather(*(journal.append([each]) for each in notes))
    assert await read_attempt(record.store, 0, 0) == notes
    assert await journal.begin() == notes


async def test_append_of_nothing_writes_nothing(record: JobRecord) -> None:
    journal = await begun(record)
    await journal.append([])
    assert await read_attempt(record.store, 0, 0) == []


async def test_append_before_begin_raises_an_error(record: JobRecord) -> None:
    journal = await Journal.claim(record, 0, 0)
    with pytest.raises(RuntimeError, match=r"call begin\(\) before append\(\)"):
        await journal.append([note("too early")])


async def test_sealed_result_is_the_stored_one_without_half_of_a_surrogate_pair(
    record: JobRecord, make_result: MakeResult
) -> None:
    sealed = await (await begun(record)).seal(make_result(0, message="half \ud83d"), None, [])
    assert sealed.message == "half ?"
    assert sealed == (await record.seals())[0].result


@dataclass(frozen=True)
class LosingStore(Store):
    """Writes, and is then interrupted before it can confirm, once for each entry of `losses`."""

    losses: tuple[list[str], ...] = ([],)

    async def create(self, key: str, data: bytes) -> bool:
        created = await super().create(key, data)
        if self.losses[0] and key.endswith(self.losses[0][0]):
            self.losses[0].pop(0)
            raise asyncio.CancelledError
        return created


async def test_cancelled_append_is_kept_and_not_taken_for_another_runners(record: JobRecord) -> None:
    losing = LosingStore(record.store.uri, record.store.objects, record.store.prefix, losses=(["1-0.jsonl.zst"],))
    record.store = losing
    journal = await begun(record)
    with pytest.raises(asyncio.CancelledError):
        await journal.append([note("cancelled")])
    await journal.append([note("next")])
    assert await read_attempt(record.store, 0, 0) == [note("cancelled"), note("next")]


async def test_cancelled_seal_can_be_repeated_with_another_outcome(record: JobRecord, make_result: MakeResult) -> None:
    record.store = LosingStore(
        record.store.uri, record.store.objects, record.store.prefix, losses=(["1-trajectory.json"],)
    )
    journal = await begun(record)
    await journal.append(TURN)
    with pytest.raises(asyncio.CancelledError):
        await journal.seal(make_result(0), None, TURN)
    cancelled = make_result(0, outcome=Outcome.CANCELLED, reward=None, passed=None, stop_reason=None)
    assert (await journal.seal(cancelled, None, TURN)).outcome is Outcome.CANCELLED


async def test_seal_that_was_written_before_the_cancellation_is_kept(
    record: JobRecord, make_result: MakeResult
) -> None:
    record.store = LosingStore(record.store.uri, record.store.objects, record.store.prefix, losses=(["seals/0.json"],))
    journal = await begun(record)
    with pytest.raises(asyncio.CancelledError):
        await journal.seal(make_result(0), None, [])
    cancelled = make_result(0, outcome=Outcome.CANCELLED, reward=None, passed=None, stop_reason=None)
    assert (await journal.seal(cancelled, None, [])).outcome is Outcome.COMPLETED


async def test_the_first_seal_wins_also_over_that_of_a_later_attempt(
    record: JobRecord, make_result: MakeResult
) -> None:
    late, early = await begun(record, 0), await begun(record, 1)
    assert (await early.seal(make_result(0, attempt=1), None, [])).attempt == 1
    assert (await late.seal(make_result(0, attempt=0), None, [])).attempt == 1
    assert (await record.seals())[0].result.attempt == 1


async def test_a_seal_lists_its_objects_and_the_result_names_the_trajectory(
    record: JobRecord, make_result: MakeResult
) -> None:
    first = await begun(record)
    await first.append(TURN[:1])
    journal = await begun(record)
    await journal.append(TURN[1:])
    stored = await journal.store_artifacts(chunks_of(b"tar"), limit=100)
    await journal.append([stored])
    result = await journal.seal(make_result(0), None, [*TURN, stored])
    assert result.trajectory == "attempts/0/0/2-trajectory.json"
    seal = (await record.seals())[0]
    assert [item.key.removeprefix("attempts/0/0/") for item in seal.objects] == [
        "2-3-records.jsonl.zst",
        "2-tokens.jsonl.zst",
        "2-trajectory.json",
        "2-artifacts.tar.zst",
    ]
    trajectory = json.loads(await record.store.get(result.trajectory) or b"")
    assert trajectory["schema_version"] == "ATIF-v1.7"


async def test_artifacts_of_an_earlier_runner_are_listed_by_the_next_ones_seal(
    record: JobRecord, make_result: MakeResult
) -> None:
    data = bytes(range(256)) * 20_000
    first = await begun(record)
    stored = await first.store_artifacts(chunks_of(data), limit=len(data))
    assert stored.bytes == len(data)
    await first.append([stored])
    second = await begun(record)
    assert b"".join([piece async for piece in second.load_artifacts(stored)]) == data
    await second.seal(make_result(0), None, [stored])
    assert (await record.seals())[0].objects[-1].key == stored.key


async def test_artifacts_over_the_limit_leave_no_object(record: JobRecord) -> None:
    journal = await begun(record)
    with pytest.raises(ArtifactsTooLarge):
        await journal.store_artifacts(chunks_of(b"x" * 100_000), limit=99_999)
    assert await record.store.get("attempts/0/0/1-artifacts.tar.zst") is None


async def test_a_missing_segment_is_reported_and_not_skipped(record: JobRecord) -> None:
    journal = await begun(record)
    for text in "abc":
        await journal.append([note(text)])
    await record.store.delete(["attempts/0/0/1-1.jsonl.zst"])
    with pytest.raises(RecordCorrupt, match=r"attempts/0/0/1-1.jsonl.zst: it is missing"):
        await begun(record)


async def test_a_missing_last_segment_of_a_closed_epoch_is_reported(record: JobRecord) -> None:
    journal = await begun(record)
    for text in "ab":
        await journal.append([note(text)])
    await begun(record)
    await record.store.delete(["attempts/0/0/1-1.jsonl.zst"])
    with pytest.raises(RecordCorrupt, match=r"1-1.jsonl.zst: it is missing"):
        await read_attempt(record.store, 0, 0)


async def test_sealed_rollout_has_only_the_records_that_its_seal_lists(
    folder: Store, record: JobRecord, make_result: MakeResult
) -> None:
    journal = await begun(record)
    await journal.append(TURN)
    await journal.seal(make_result(0), None, TURN)
    run = await open_run(folder, "fix")
    assert await run.records(0) == TURN
    assert [branch.token_ids for branch in await run.tokens(0)] == [[1, 2, 3]]
    await record.store.put("attempts/0/0/1-1-records.jsonl.zst", b"something else")
    with pytest.raises(RecordCorrupt, match=r"1-1-records.jsonl.zst: its SHA-256 or size differs from the seal"):
        await run.records(0)


async def names(record: JobRecord) -> set[str]:
    return {item.key.removeprefix("attempts/0/0/") for item in await record.store.list("attempts")}


async def test_sealed_records_replace_the_segments_of_all_epochs(record: JobRecord, make_result: MakeResult) -> None:
    first = await begun(record)
    await first.append(TURN[:1])
    second = await begun(record)
    await second.append(TURN[1:])
    await second.seal(make_result(0), None, TURN)
    # The closing remains, so that the first holder is still refused.
    files = {"epoch-1.json", "epoch-2.json", "1-1.jsonl.zst", "2-2-records.jsonl.zst"}
    assert await names(record) == {*files, "2-tokens.jsonl.zst", "2-trajectory.json"}
    assert await read_attempt(record.store, 0, 0) == TURN
    with pytest.raises(Superseded):
        await first.append([note("too late")])


async def test_run_that_was_opened_before_the_seal_reads_the_records_after_it(
    folder: Store, record: JobRecord, make_result: MakeResult
) -> None:
    journal = await begun(record)
    await journal.append(TURN)
    run = await open_run(folder, "fix")
    assert await run.records(0) == TURN
    await journal.seal(make_result(0), None, TURN)
    assert await run.records(0) == TURN


async def test_runner_that_takes_a_sealed_rollout_over_gets_its_result(
    record: JobRecord, make_result: MakeResult
) -> None:
    first = await begun(record)
    second = await Journal.claim(record, 0, 0)
    third = await Journal.claim(record, 0, 0)
    await third.begin()
    await third.seal(make_result(0, message="sealed"), None, [])
    for late in (second.peek, third.peek, (await Journal.claim(record, 0, 0)).begin):
        with pytest.raises(AlreadySealed) as caught:
            await late()
        assert caught.value.result.message == "sealed"
    with pytest.raises(Superseded):
        await first.append([note("too late")])


@dataclass(frozen=True)
class KeepingStore(Store):
    """Refuses to delete, as credentials that protect records do."""

    refused: list[str] = field(default_factory=list)

    async def delete(self, keys: Sequence[str]) -> None:
        self.refused.extend(keys)
        raise StorageError("AccessDenied")


async def test_storage_that_deletes_nothing_is_asked_once_and_keeps_the_segments(
    record: JobRecord, make_result: MakeResult
) -> None:
    record.store = keeping = KeepingStore(record.store.uri, record.store.objects, record.store.prefix)
    for index in (0, 1):
        journal = await Journal.claim(record, index, 0)
        await journal.begin()
        await journal.append(TURN)
        await journal.seal(make_result(index), None, TURN)
    assert keeping.refused == ["attempts/0/0/epoch-1.start.json", "attempts/0/0/1-0.jsonl.zst"]
    assert await read_attempt(record.store, 0, 0) == TURN
    assert await read_attempt(record.store, 1, 0) == TURN


async def test_seal_that_lists_no_records_of_its_turns_is_reported(
    folder: Store, record: JobRecord, make_result: MakeResult
) -> None:
    journal = await begun(record)
    await journal.append(TURN)
    await journal.seal(make_result(0, turns=1), None, TURN)
    seal = (await record.seals())[0]
    others = [item for item in seal.objects if not item.key.endswith("records.jsonl.zst")]
    await record.store.put("seals/0.json", json_bytes(seal.model_copy(update={"objects": others})))
    run = await open_run(folder, "fix")
    with pytest.raises(RecordCorrupt, match=r"seals/0.json: it lists no records of the rollout's 1 turns"):
        await run.records(0)


@dataclass(frozen=True)
class SlowStore(Store):
    """Accepts no deletions for now."""

    waited: list[float] = field(default_factory=list)

    async def delete(self, keys: Sequence[str]) -> None:
        self.waited.append(self.patience_seconds)
        raise StorageUnavailable("503 SlowDown")


async def test_deletions_that_storage_does_not_accept_delay_one_seal_only(
    record: JobRecord, make_result: MakeResult
) -> None:
    record.store = slow = SlowStore(record.store.uri, record.store.objects, record.store.prefix)
    for index in (0, 1):
        journal = await Journal.claim(record, index, 0)
        await journal.begin()
        await journal.append(TURN)
        await journal.seal(make_result(index), None, TURN)
    assert slow.waited == [DELETE_SECONDS]
