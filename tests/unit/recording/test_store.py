"""Everything recorded depends on a store's answer to a write."""

import asyncio
import hashlib
import itertools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from agent_runtime.recording.store import (
    FINAL_CODES,
    INLINE_BYTES,
    LARGE_AT_ONCE,
    PART_BYTES,
    TRANSIENT_CODES,
    StorageError,
    StorageUnavailable,
    Store,
    classified,
    first_line,
)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest) -> Store:
    chosen: Store = request.getfixturevalue(request.param)
    return chosen


async def test_exactly_one_of_many_writers_of_a_key_wins(store: Store) -> None:
    won = await asyncio.gather(*(store.create("key", b"%d" % number) for number in range(50)))
    assert won.count(True) == 1
    assert await store.get("key") == b"%d" % won.index(True)


async def test_writing_the_same_bytes_again_is_a_success_because_a_reply_may_have_got_lost(store: Store) -> None:
    assert await store.create("key", b"mine")
    assert await store.create("key", b"mine")
    assert not await store.create("key", b"yours")


async def test_missing_object_reads_as_none(store: Store) -> None:
    assert await store.get("nothing/here") is None
    assert await store.get_all(["nothing/here"]) == [None]


async def test_listings_are_relative_and_see_whole_folder_names_only(store: Store) -> None:
    run = store.below("run-1")
    await run.put("seals/0.json", b"{}")
    await run.put("seals/deep/er.json", b"{}")
    await run.put("seals-of-others/1.json", b"{}")
    assert sorted(meta.key for meta in await run.list("seals")) == ["seals/0.json", "seals/deep/er.json"]
    assert [meta.key for meta in await run.list("seals/deep/")] == ["seals/deep/er.json"]
    assert await run.folders() == ["seals", "seals-of-others"]
    assert await store.folders() == ["run-1"]
    assert await run.folders("seals") == ["deep"]


async def test_deleting_a_missing_object_succeeds(store: Store) -> None:
    await store.put("a", b"1")
    await store.delete(["a", "b"])
    assert await store.get("a") is None


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 7])
async def test_large_object_of_any_size_is_written_and_read_completely(store: Store, size: int) -> None:
    data = hashlib.shake_128(b"x").digest(size)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, size, 1_000_003):
            yield data[start : start + 1_000_003]

    digest = await store.create_stream("large", chunks())
    assert (digest.key, digest.bytes) == ("large", size)
    assert digest.sha256 == hashlib.sha256(data).hexdigest()
    assert b"".join([piece async for piece in store.stream("large")]) == data
    with pytest.raises(StorageError, match="a different object already has this key"):
        await store.create_stream("large", another_object(size))


async def another_object(size: int) -> AsyncIterator[bytes]:
    yield b"y" * (size + 1)


@pytest.mark.parametrize("size", [100, PART_BYTES + 100])
async def test_failing_source_leaves_no_object_and_its_own_exception(store: Store, size: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * size
        raise LookupError("the sandbox is gone")

    with pytest.raises(LookupError, match="the sandbox is gone"):
        await store.create_stream("large", chunks())
    assert await store.get("large") is None
    assert await store.list("") == []


async def test_large_objects_are_written_a_few_at_a_time(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put, under_way, most = obstore.put_async, 0, 0

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return await put(*arguments, **options)

    monkeypatch.setattr(obstore, "put_async", counted)
    folder = memory.below("run")
    await asyncio.gather(*(folder.create(f"large-{n}", bytes(INLINE_BYTES + 1)) for n in range(LARGE_AT_ONCE + 4)))
    assert most == LARGE_AT_ONCE


async def test_probe_accepts_a_working_store_and_leaves_nothing_in_it(store: Store) -> None:
    await store.probe()
    assert await store.list("") == []


async def test_read_only_folder_is_read_and_refused_for_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(b"data")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everywhere
    store = Store.open(str(tmp_path), {})
    assert await store.get("key") == b"data"
    with pytest.raises(StorageError, match="is not writable; change its permissions or the URI"):
        await store.probe()


def test_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    for uri in (tmp_path / "out", tmp_path / "out/below"):
        with pytest.raises(StorageError, match=f"{uri}: {tmp_path}/out is a file, expected a folder; change the URI"):
            Store.open(str(uri), {})


def test_a_local_folder_is_made_from_a_path_or_a_file_uri(tmp_path: Path) -> None:
    for uri in (str(tmp_path / "a/b"), f"file://{tmp_path}/with%20space"):
        Store.open(uri, {})
    assert (tmp_path / "a/b").is_dir()
    assert (tmp_path / "with space").is_dir()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://host/x", "scheme 'ftp' is not known; use s3, gs, az, file or a local path"),
        ("s3:///prefix", "the bucket is missing"),
    ],
)
def test_impossible_uri_is_refused_with_advice(uri: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        Store.open(uri, {})


async def test_file_in_place_of_a_folder_fails_without_retries(folder: Store) -> None:
    await folder.put("seals", b"")
    with pytest.raises(StorageError, match="the folder refuses it"):
        await asyncio.wait_for(folder.create("seals/0.json", b"{}"), 5)


def refusal(status: int, code: str) -> str:
    """Return obstore's error for an answer of an S3 server."""
    xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>why</Message></Error>" if code else ""
    return (
        "Generic S3 error: Error performing PUT http://s3/b/key in 1ms - Server returned non-2xx status code: "
        f"{status} "
        f"Any: {xml}\n\nDebug source:\nGeneric {{\n}}"
    )


@pytest.mark.parametrize("code", [*TRANSIENT_CODES, *FINAL_CODES])
def test_error_code_is_decisive_with_any_status(code: str) -> None:
    for kind, status in itertools.product(
        (GenericError, PermissionDeniedError), (200, 400, 401, 403, 404, 409, 412, 429, 500, 503)
    ):
        found = classified("s3://b/key", kind(refusal(status, code)), on_disk=False)
        assert isinstance(found, StorageUnavailable) == (code in TRANSIENT_CODES)
        assert code in str(found)
        assert str(found).endswith({**TRANSIENT_CODES, **FINAL_CODES}[code])


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (refusal(403, ""), True),
        (refusal(400, ""), True),
        (refusal(404, ""), False),
        (refusal(401, ""), False),
        (refusal(403, "AccountProblem"), False),
        (refusal(400, "InvalidArgument"), False),
        (refusal(408, ""), True),
        (refusal(503, "NeverHeardOf"), True),
        ("Generic S3 error: Error performing PUT http://s3/b/key - HTTP error: error sending request", True),
        ("Generic S3 error: Unable to extract metadata from headers: ETag Header missing from response", True),
        ("Generic S3 error: Failed to read token file '/x': No such file or directory (os error 2)", True),
        ("Generic S3 error: DeleteObjects request failed for key p/x: Slow down (code: SlowDown)", True),
        ("Generic S3 error: DeleteObjects request failed for key p/x: Access Denied (code: AccessDenied)", False),
        ("Generic S3 error: Received redirect without LOCATION, this normally indicates", False),
    ],
)
def test_refusal_without_a_listed_code_is_judged_by_its_status(error: str, transient: bool) -> None:
    assert isinstance(classified("s3://b/key", GenericError(error), on_disk=False), StorageUnavailable) == transient


@pytest.mark.parametrize(
    ("uri", "environ"),
    [
        (
            "s3://bucket/some/prefix",
            {"AWS_REGION": "eu-west-1", "AWS_PROFILE": "mine", "AWS_ENDPOINT_URL": "http://x:1"},
        ),
        ("az://container/prefix", {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
        ("gs://bucket/prefix", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "k", "client_email": "e"}'}),
    ],
)
def test_settings_are_from_the_given_environment_and_unknown_ones_have_no_effect(
    uri: str, environ: dict[str, str]
) -> None:
    if uri.startswith("gs://"):
        with pytest.raises(StorageError, match="gs://bucket/prefix: cannot be opened"):
            Store.open(uri, environ)  # obstore looked at this very key, and refuses it
    else:
        store = Store.open(uri, environ)
        assert store.prefix.endswith("prefix/")
        assert store.below("run").uri == f"{uri}/run"


EXITS_AT_ONCE = """
import asyncio, sys
from agent_runtime.recording.store import Store
sys.setswitchinterval(100)  # No other thread gets the GIL unless the main thread releases it.
async def main():
    store = Store.open(sys.argv[1], {})
    await asyncio.gather(*(store.folders() for _ in range(16)))
asyncio.run(main())
"""


async def test_a_program_that_ends_right_after_a_request_exits_with_0(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXITS_AT_ONCE]
    programs = [await asyncio.create_subprocess_exec(*command, str(tmp_path / str(place))) for place in range(16)]
    assert [await program.wait() for program in programs] == [0] * 16


def test_missing_credentials_and_unwritable_folders_are_named_in_words() -> None:
    asked = RuntimeError(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token\n\nDebug source: {}"
    )
    assert first_line(asked).startswith("the environment has no credentials, such as AWS_ACCESS_KEY_ID")
    assert "Debug" not in first_line(asked)
    assert first_line(PermissionError(13, "Permission denied", "out")) == "permission denied"
