"""Layers are shared by content, checked when they are read, and kept as long as a run names them."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from agent_runtime.recording.gc import collect
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.layers import SPARED_SECONDS, Layers, LayerTooLarge, key_of
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store
from rollout_api.records import Layer


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def joined(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in stream])


@given(st.lists(st.binary(max_size=2000), max_size=5))
async def test_layer_is_restored_completely_and_equal_layers_are_stored_once(data: list[bytes]) -> None:
    output = Store("memory:", MemoryStore())
    one, other = (Layers(output, output.below(run)) for run in ("one-00000000", "other-00000000"))
    layer = await one.keep(pieces(*data), 10**6)
    assert await other.keep(pieces(b"".join(data)), 10**6) == layer
    assert await joined(other.load(layer)) == b"".join(data)
    assert [meta.key for meta in await output.list("layers")] == [key_of(layer.digest)]


async def test_a_layer_over_the_limit_is_not_stored(memory: Store) -> None:
    with pytest.raises(LayerTooLarge, match=r"sandbox\.snapshotLimit, 3 bytes"):
        await Layers(memory, memory.below("run")).keep(pieces(b"1234"), 3)
    assert await memory.list("") == []


async def test_a_layer_of_many_megabytes_goes_through_the_disk(folder: Store) -> None:
    content = os.urandom(20_000_000)
    layers = Layers(folder, folder.below("run"))
    layer = await layers.keep(pieces(content[:7], content[7:]), 10**8)
    assert await joined(layers.load(layer)) == content


async def test_damaged_and_missing_layers_are_reported(memory: Store) -> None:
    layers = Layers(memory, memory.below("run"))
    one, other = [await layers.keep(pieces(data), 100) for data in (b"one", b"two")]
    await memory.put(key_of(one.digest), await memory.get(key_of(other.digest)) or b"")
    with pytest.raises(RecordCorrupt, match="its content does not match its name"):
        await joined(layers.load(one))
    with pytest.raises(RecordCorrupt, match="it is missing, but a snapshot needs it"):
        await joined(layers.load(Layer(digest="0" * 64, bytes=1)))


async def test_old_layer_that_no_run_names_is_deleted(folder: Store, record: JobRecord, tmp_path: Path) -> None:
    named = await Layers(folder, record.store).keep(pieces(b"named"), 100)
    unnamed = await Layers(folder, folder.below("gone-00000000")).keep(pieces(b"unnamed"), 100)
    fresh = await Layers(folder, folder.below("gone-00000000")).keep(pieces(b"fresh"), 100)
    for layer in (named, unnamed):
        path = tmp_path / "out" / key_of(layer.digest)
        old = path.stat().st_mtime - SPARED_SECONDS - 60
        os.utime(path, (old, old))
    await folder.delete([f"gone-00000000/layers/{layer.digest}" for layer in (unnamed, fresh)])
    for dry_run in (True, False):
        plan = await collect(folder, keep_newest=1, dry_run=dry_run)
        assert [meta.key for meta in plan.layers] == [key_of(unnamed.digest)]
    assert {meta.key for meta in await folder.list("layers")} == {key_of(named.digest), key_of(fresh.digest)}


@pytest.mark.parametrize("moment", range(1, 13))
async def test_layer_that_a_run_keeps_while_gc_deletes_it_is_not_lost(
    folder: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    layer = await Layers(folder, folder.below("gone-00000000")).keep(pieces(b"layer"), 100)
    await folder.delete([f"gone-00000000/layers/{layer.digest}"])
    path = tmp_path / "out" / key_of(layer.digest)
    old = path.stat().st_mtime - SPARED_SECONDS - 60
    os.utime(path, (old, old))
    layers = Layers(folder, folder.below("run-00000000"))
    requests = itertools.count(1)
    writer: asyncio.Task[Layer] | None = None
    request = Store._retried

    async def with_a_writer_before(self: Store, *operation: Any) -> Any:
        nonlocal writer
        if asyncio.current_task() is gc and next(requests) == moment:
            writer = asyncio.create_task(layers.keep(pieces(b"layer"), 100))
            await asyncio.wait([writer], timeout=0.3)
        return await request(self, *operation)

    monkeypatch.setattr(Store, "_retried", with_a_writer_before)
    gc = asyncio.create_task(collect(folder, keep_newest=1, dry_run=False))
    await gc
    assert await (writer or layers.keep(pieces(b"layer"), 100)) == layer
    assert await joined(layers.load(layer)) == b"layer"
    assert [meta.key for meta in await folder.list("layers")] == [key_of(layer.digest)], "a marker is left"


async def test_an_old_layer_that_is_kept_again_is_new_again(folder: Store, tmp_path: Path) -> None:
    layers = Layers(folder, folder.below("run"))
    layer = await layers.keep(pieces(b"x"), 100)
    path = tmp_path / "out" / key_of(layer.digest)
    old = path.stat().st_mtime - SPARED_SECONDS
    os.utime(path, (old, old))
    await layers.keep(pieces(b"x"), 100)
    assert path.stat().st_mtime > old + 60


async def test_damaged_layer_of_unknown_size_is_reported(memory: Store) -> None:
    layers = Layers(memory, memory.below("run"))
    kept = [(await layers.keep(pieces(data), 10**4)).digest for data in (b"a" * 99, b"b" * 99, b"c" * 99)]
    cut = await memory.get(key_of(kept[1])) or b""
    await memory.put(key_of(kept[1]), cut[:-3])
    await memory.put(key_of(kept[2]), cut)
    assert sorted(await layers.stored()) == sorted(kept)
    await layers.check(kept[0])
    for damaged, message in ((kept[1], "but more were stored"), (kept[2], "does not match its name")):
        with pytest.raises(RecordCorrupt, match=message):
            await layers.check(damaged)
