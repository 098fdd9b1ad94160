"""Artifacts wait in the temporary folder until they are stored. How large they are is the policy's choice."""

import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_runtime.engine.attribution import Action, Phase, Situation, attribute
from agent_runtime.recording.store import SpoolFull, Store


@pytest.fixture
def small_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 40 MB."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("of_others", "action"), [(0, Action.COMPLETE), (25_000_000, Action.RETRY_ATTEMPT)], ids=["own", "others"]
)
async def test_artifacts_that_find_no_room_are_the_policys_doing_only_if_they_fill_the_disk(
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
