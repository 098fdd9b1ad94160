"""Objects are read from remote storage once for all that need them, and few stay on disk."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from obstore.store import MemoryStore

from agent_runtime.recording import downloads as downloads_module
from agent_runtime.recording.downloads import Downloads
from agent_runtime.recording.store import StorageError, Store


class CountingStore(Store):
    """Counts the reads of each object. While `held`, they wait."""

    def __init__(self) -> None:
        super().__init__("memory:", MemoryStore())
        self.reads: list[str] = []
        self.held = asyncio.Event()
        self.held.set()

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        self.reads.append(key)
        await self.held.wait()
        async for piece in super().stream(key):
            yield piece


async def read(downloads: Downloads, key: str) -> bytes:
    return b"".join([piece async for piece in downloads.stream(key)])


async def test_all_that_need_an_object_share_one_read_even_if_the_first_gives_up() -> None:
    store, content = CountingStore(), os.urandom(20_000_000)
    await store.put("a", content)
    downloads = Downloads(store)
    store.held.clear()
    first, *others = [asyncio.create_task(read(downloads, "a")) for _ in range(4)]
    await asyncio.sleep(0)
    first.cancel()
    store.held.set()
    assert await asyncio.gather(*others) == [content] * 3
    assert await read(downloads, "a") == content
    assert store.reads == ["a"]


async def test_the_objects_needed_longest_ago_are_forgotten() -> None:
    store = CountingStore()
    for key in "abc":
        await store.put(key, key.encode() * 400)
    downloads = Downloads(store, most_bytes=1000)
    for key in "abacba":
        assert await read(downloads, key) == key.encode() * 400
    assert store.reads == ["a", "b", "c", "b", "a"]


async def test_few_objects_are_kept_because_each_has_an_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads_module, "MOST_KEPT", 2)
    store = CountingStore()
    for key in "abc":
        await store.put(key, b"")
    downloads = Downloads(store)
    for key in "abcba":
        await read(downloads, key)
    assert store.reads == ["a", "b", "c", "a"]


async def test_an_object_that_is_too_large_to_be_kept_is_read_from_storage() -> None:
    store = CountingStore()
    await store.put("a", bytes(2000))
    downloads = Downloads(store, most_bytes=1000)
    assert await read(downloads, "a") == bytes(2000)


async def test_reading_of_a_missing_object_is_tried_again() -> None:
    store = CountingStore()
    downloads = Downloads(store)
    with pytest.raises(StorageError, match="does not exist"):
        await read(downloads, "a")
    await store.put("a", b"now")
    assert await read(downloads, "a") == b"now"


async def test_slow_reader_keeps_an_object_that_is_forgotten() -> None:
    store, content = CountingStore(), os.urandom(20_000_000)
    await store.put("a", content)
    downloads = Downloads(store)
    stream = downloads.stream("a")
    begin = await anext(stream)
    downloads.forget("a")
    assert begin + b"".join([piece async for piece in stream]) == content
