"""A real S3 server behind a bad network: acknowledged writes exist, and each existing object is known to be ours or
another's.
"""

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator

import pytest

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import AlreadySealed, Journal, Superseded
from agent_runtime.recording.reader import open_run, read_attempt
from agent_runtime.recording.store import PART_BYTES, StorageError, StorageUnavailable, Store
from rollout_api.records import Record, Result, StopReason, StopRecord
from tests.support.fault_proxy import FaultProxy
from tests.support.records import completed, small_job
from tests.support.s3 import S3, careless_s3

JOB = small_job(uid="0d5c1c36-87a2-4f0e-9a53-1f3f6f2c7d11")
TASKS = JOB.spec.tasks.inline or []


def note(text: str) -> StopRecord:
    return StopRecord(time=0, stop_reason=StopReason.FINISHED, message=text)


def texts(records: list[Record]) -> list[str]:
    return [record.message for record in records if isinstance(record, StopRecord)]


def result(message: str) -> Result:
    return completed(task="a", message=message)


async def test_own_writes_are_told_from_others_when_replies_are_lost(through: Store, proxy: FaultProxy) -> None:
    proxy.lost_reply = 0.5
    ours = await asyncio.gather(*(through.create(f"ours/{n}", b"mine") for n in range(20)))
    assert all(ours), "a write that was done, and whose reply was lost, was taken for somebody else's"
    theirs = await asyncio.gather(*(through.create(f"ours/{n}", b"another's") for n in range(20)))
    assert not any(theirs)
    assert proxy.seen["lost reply"] > 10


async def test_racing_writers_on_a_bad_network_have_one_winner_a_key(
    through: Store, direct: Store, proxy: FaultProxy
) -> None:
    proxy.unavailable = proxy.lost_reply = proxy.conflict = 0.15
    for key in range(5):
        won = await asyncio.gather(*(through.create(f"key/{key}", b"writer %d" % writer) for writer in range(8)))
        assert won.count(True) == 1
        assert await direct.get(f"key/{key}") == b"writer %d" % won.index(True)


async def test_results_are_written_although_another_write_of_them_is_under_way(
    through: Store, direct: Store, proxy: FaultProxy
) -> None:
    proxy.conflict = 0.5
    for number in range(5):
        await through.put("results.jsonl", b"%d" % number)
        assert await direct.get("results.jsonl") == b"%d" % number
    assert proxy.seen["conflict"]


async def test_runners_that_take_over_on_a_bad_network_lose_no_acknowledged_record(
    through: Store, direct: Store, proxy: FaultProxy
) -> None:
    proxy.unavailable = proxy.throttled = proxy.conflict = proxy.lost_request = proxy.lost_reply = 0.08
    acknowledged: list[str] = []

    async def work(name: str, delay: float) -> str | None:
        await asyncio.sleep(delay)
        record = await JobRecord.open(through, JOB, TASKS)
        journal = await Journal.claim(record, 0, 0)
        try:
            known = set(acknowledged)
            assert known <= set(texts(await journal.begin()))
            for number in range(6):
                await journal.append([note(f"{name}{number}")])
                acknowledged.append(f"{name}{number}")
            return (await journal.seal(result(name), None, [])).message
        except AlreadySealed as sealed:
            return sealed.result.message
        except Superseded:
            return None

    sealed = await asyncio.gather(*(work(name, position * 0.4) for position, name in enumerate("abcd")))
    assert len({name for name in sealed if name}) == 1
    record = await JobRecord.open(direct, JOB, TASKS)
    final = texts(await read_attempt(record.store, 0, 0))
    assert len(final) == len(set(final))
    for name in "abcd":  # a repeated call may be recorded after the next runner's first append
        mine = [text for text in acknowledged if text[0] == name]
        assert [text for text in final if text[0] == name][: len(mine)] == mine
    writers = [name for name, _ in itertools.groupby(text[0] for text in final)]
    assert len(writers) == len(set(writers)), "an older runner's record follows a newer one's"
    assert sum(proxy.seen[fault] for fault in ("unavailable", "conflict", "lost request", "lost reply")) > 0


async def test_runner_waits_for_unreachable_storage_and_continues(through: Store, proxy: FaultProxy) -> None:
    proxy.down = True
    writing = asyncio.create_task(through.create("key", b"data"))
    done, _ = await asyncio.wait([writing], timeout=1)
    assert not done
    proxy.down = False
    assert await writing


async def test_error_after_the_last_retry_names_the_object(s3: S3, proxy: FaultProxy, uri: str) -> None:
    impatient = Store.open(uri, s3.environ(proxy.port), patience_seconds=0)
    proxy.unavailable = 1
    with pytest.raises(StorageUnavailable, match=rf"{uri}/some/key: storage did not accept the request .*SlowDown"):
        await impatient.create("some/key", b"data")


async def test_artifacts_pass_a_bad_network_whole(through: Store, direct: Store, proxy: FaultProxy) -> None:
    proxy.unavailable = proxy.lost_reply = 0.1
    data = os.urandom(20_000_000)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 250_000):
            yield data[start : start + 250_000]

    digest = await through.create_stream("large", chunks())
    assert (digest.bytes, digest.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert b"".join([piece async for piece in through.stream("large")]) == data
    assert [meta.size for meta in await direct.list("")] == [len(data)]


async def test_a_run_in_s3_is_resumed_read_and_finished(direct: Store) -> None:
    await direct.probe()
    record = await JobRecord.open(direct, JOB, TASKS)
    journal = await Journal.claim(record, 0, 0)
    await journal.begin()
    await journal.append([note("a")])
    await journal.seal(result("done"), None, [note("a")])
    assert (await JobRecord.open(direct, JOB, TASKS)).resumed
    await record.finish_shard(0, {})
    assert await record.finish(1)
    run = await open_run(direct, record.folder)
    assert texts(await run.records(0)) == ["a"]
    assert await record.attempts(0) == [0]


PASSING_REFUSALS = [
    (400, "RequestTimeout"),
    (400, "ExpiredToken"),
    (403, "RequestTimeTooSkewed"),
    (409, "OperationAborted"),
    (409, "ConditionalRequestConflict"),
    (400, "BadDigest"),
    (400, "IncompleteBody"),
    (503, "SlowDown"),
    (500, "InternalError"),
    (429, "TooManyRequests"),
]


@pytest.mark.parametrize("refusal", PASSING_REFUSALS)
async def test_run_survives_every_operation_refused_once(
    through: Store, direct: Store, proxy: FaultProxy, refusal: tuple[int, str]
) -> None:
    async def large() -> AsyncIterator[bytes]:
        yield b"x" * (PART_BYTES + 1)

    proxy.refusals = [refusal]
    assert await through.create("key", b"data")
    for operation in (
        lambda: through.put("other", b"data"),
        lambda: through.get("key"),
        lambda: through.modified("key"),
        lambda: through.list(""),
        lambda: through.folders(),
        lambda: through.create_stream("large", large()),
        lambda: through.delete(["other"]),
    ):
        assert not proxy.refusals
        proxy.refusals = [refusal]
        await operation()
    assert sorted(meta.key for meta in await direct.list("")) == ["key", "large"]


async def test_large_upload_survives_a_refused_part(through: Store, direct: Store, proxy: FaultProxy) -> None:
    async def large() -> AsyncIterator[bytes]:
        yield b"x" * PART_BYTES
        yield b"y" * PART_BYTES

    proxy.refusals = [(404, "NoSuchKey"), (404, "NoSuchUpload"), (400, "RequestTimeout"), (400, "RequestTimeout")]
    await through.create_stream("large", large())
    assert [meta.size for meta in await direct.list("")] == [2 * PART_BYTES]


@pytest.mark.parametrize("code", ["NoSuchBucket", "XAdminUserNotFound"])
async def test_refusal_with_status_404_is_not_a_missing_object(through: Store, proxy: FaultProxy, code: str) -> None:
    proxy.refusals = [(404, code)]
    with pytest.raises(StorageError, match=f"{code}.*; (create the bucket|correct AWS_ACCESS_KEY_ID)"):
        await through.get("journal/of/a/rollout")


async def test_probe_says_how_to_correct_credentials_and_bucket(s3: S3, uri: str) -> None:
    for wrong, advice in (
        (Store.open(uri, s3.environ() | {"AWS_SECRET_ACCESS_KEY": "wrong"}), "correct AWS_SECRET_ACCESS_KEY"),
        (Store.open(uri, s3.environ() | {"AWS_ACCESS_KEY_ID": "wrong"}), "correct AWS_ACCESS_KEY_ID"),
        (Store.open("s3://no-such-bucket/x", s3.environ()), r"NoSuchBucket: .*; create the bucket, or correct output"),
    ):
        with pytest.raises(StorageError, match=advice) as refused:
            await asyncio.wait_for(wrong.probe(), 10)
        assert not isinstance(refused.value, StorageUnavailable)


async def test_storage_without_create_only_writes_is_refused_before_recording() -> None:
    async with careless_s3() as careless:
        store = Store.open(careless.uri("x"), careless.environ())
        with pytest.raises(StorageError, match=r"If-None-Match.*use storage that supports the condition"):
            await store.probe()


async def test_probe_succeeds_through_an_unreliable_network(through: Store, proxy: FaultProxy) -> None:
    proxy.unavailable = proxy.lost_reply = 0.2
    await through.probe()
