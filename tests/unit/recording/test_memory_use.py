from pathlib import Path

import pytest

from agent_runtime.recording.memory_use import MemoryUse
from agent_runtime.recording.store import Store
from rollout_api.measured_memory import KEPT_SECONDS, Measured

USED = Measured(seconds=10, byte_seconds=1000, square_seconds=200_000)


async def test_what_was_written_is_read_by_kind_and_old_use_fades(tmp_path: Path) -> None:
    records = MemoryUse(Store.open(str(tmp_path), {}))
    await records.write("a", USED)
    assert (await records.read("a"), await records.read("b")) == (USED, Measured())
    await records.write("a", Measured(seconds=2 * KEPT_SECONDS))
    assert (await records.read("a")).seconds == KEPT_SECONDS


@pytest.mark.parametrize("written", [b"no JSON", b'{"seconds": -1}', b"[]"])
async def test_damaged_records_are_as_none(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/a.json").write_bytes(written)
    assert await MemoryUse(Store.open(str(tmp_path), {})).read("a") == Measured()


async def test_storage_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("no folder")
    records = MemoryUse(Store.open(str(tmp_path), {}, patience_seconds=0.1))
    await records.write("a", USED)
    assert await records.read("a") == Measured()
