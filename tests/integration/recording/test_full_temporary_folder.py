"""Artifacts wait in the temporary folder until they are stored. How large they are is the policy's choice."""

import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_runtime.engine.attribution import Action, Phase, Situation, attribute
from agent_runtime.recording.store import StorageError, Store


@pytest.fixture
def small_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 10 MB."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", folder], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


async def test_artifacts_that_find_no_room_end_the_run_and_cost_no_attempt(
    tmp_path: Path, small_temporary_folder: Path
) -> None:
    async def large() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(1_000_000)

    store = Store.open(str(tmp_path / "out"), {})
    with pytest.raises(StorageError, match=f"{small_temporary_folder}.*make room or set TMPDIR.*to resume") as refused:
        await store.create_stream("artifacts", large())
    situation = Situation(Phase.COLLECTING, answered=True, exposed=True)
    assert attribute(refused.value, situation).action is Action.END_RUN, "three attempts later it would be masked"
    assert await store.list("") == []
