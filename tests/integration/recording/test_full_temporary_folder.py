"""Artifacts wait in the temporary folder until they are stored. The policy controls their size."""

import asyncio
import contextlib
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from obstore.store import MemoryStore

from agent_runtime.engine.attempt import grading
from agent_runtime.engine.attempt.attribution import Action, Phase, Situation, attribute
from agent_runtime.recording.downloads import Downloads
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.store import SpoolFull, Store
from agent_runtime.sandboxes.base import Workspace
from rollout_api.records import ArtifactsRecord, StopReason, StopRecord
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task, TaskVerifier


@pytest.fixture
def small_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 40 MB."""
    with temporary_folder(tmp_path, monkeypatch, "size=40m") as folder:
        yield folder


@contextlib.contextmanager
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("of_others", "action"), [(0, Action.COMPLETE), (25_000_000, Action.RETRY_ATTEMPT)], ids=["own", "others"]
)
async def test_artifacts_without_room_count_only_if_they_fill_the_disk_themselves(
    tmp_path: Path, small_temporary_folder: Path, of_others: int, action: Action
) -> None:
    async def large() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield bytes(1_000_000)

    (small_temporary_folder / "others").write_bytes(bytes(of_others))
    store = Store.open(str(tmp_path / "out"), {})
    with pytest.raises(SpoolFull, match=f"{small_temporary_folder}.*make room or set TMPDIR") as refused:
        await store.create_stream("artifacts", large())
    assert attribute(refused.value, Situation(Phase.COLLECTING, answered=True, exposed=True)).action is action
    assert await store.list("") == []


async def test_downloads_make_room_for_artifacts(tmp_path: Path, small_temporary_folder: Path) -> None:
    async def large() -> AsyncIterator[bytes]:
        for _ in range(15):
            yield bytes(1_000_000)

    remote = Store("memory:", MemoryStore())
    downloads = Downloads(remote)
    for number in range(6):
        await remote.put(f"layer-{number}", bytes(12_000_000))
        assert len(b"".join([piece async for piece in downloads.stream(f"layer-{number}")])) == 12_000_000
    stored = await Store.open(str(tmp_path / "out"), {}).create_stream("artifacts", large())
    assert stored.bytes == 15_000_000


@pytest.mark.parametrize("options", ["size=40m", "size=40m,nr_inodes=1"])
async def test_downloads_are_read_from_storage_if_the_temporary_folder_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    remote = Store("memory:", MemoryStore())
    await remote.put("layer", b"x" * 3000)
    with temporary_folder(tmp_path, monkeypatch, options) as folder:
        with contextlib.suppress(OSError):
            (folder / "others").write_bytes(bytes(50_000_000))
        assert b"".join([piece async for piece in Downloads(remote).stream("layer")]) == b"x" * 3000


async def test_artifacts_are_stored_through_a_temporary_folder_without_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def large() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield bytes(1_000_000)

    with temporary_folder(tmp_path, monkeypatch, "size=0"):
        stored = await Store.open(str(tmp_path / "out"), {}).create_stream("artifacts", large())
    assert stored.bytes == 10_000_000


async def test_artifacts_wait_for_room_that_other_rollouts_take(
    tmp_path: Path, small_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy could lose its attempts with large artifacts, as soon as several rollouts store theirs at
    once.
    """
    monkeypatch.setattr(grading, "ROOM_PAUSE_SECONDS", 0.05)
    store, at_once = Store.open(str(tmp_path / "out"), {}), asyncio.Barrier(3)
    tries: Counter[int] = Counter()

    class Keeping:
        def __init__(self, number: int) -> None:
            self.number = number

        async def store_artifacts(self, chunks: AsyncIterator[bytes], limit: int) -> ArtifactsRecord:
            stored = await store.create_stream(f"artifacts-{self.number}", chunks)
            return ArtifactsRecord(time=0, key=stored.key, bytes=stored.bytes)

    class Full:
        working_dir = "/work"

        def __init__(self, number: int) -> None:
            self.number = number

        async def acknowledge(self, turn: int) -> None: ...

        async def kill_all(self, *, key: str) -> None: ...

        async def tar(self, path: str, *, parts: Sequence[str]) -> AsyncIterator[bytes]:
            tries[self.number] += 1
            for megabyte in range(15):
                if megabyte == 10 and tries[self.number] == 1:
                    await at_once.wait()
                yield bytes(1_000_000)

    async def keep(number: int) -> tuple[StopRecord, ArtifactsRecord]:
        task = Task(name="t", prompt="p", verifier=TaskVerifier(commands=["true"]))
        stop = StopRecord(time=0, stop_reason=StopReason.FINISHED)
        workspace, journal = cast(Workspace, Full(number)), cast(Journal, Keeping(number))
        return await grading.store_artifacts(task, Verifier(), workspace, journal, stop)

    kept = await asyncio.gather(*(keep(number) for number in range(3)))
    assert [(stop.stop_reason, stored.bytes) for stop, stored in kept] == [(StopReason.FINISHED, 15_000_000)] * 3
    assert tries.total() > 3, "nobody had to wait"
