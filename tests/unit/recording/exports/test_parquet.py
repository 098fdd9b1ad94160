"""A run as a Parquet file, from which nothing may be missing."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agent_runtime.export.parquet import ROW_GROUP, PyarrowMissing, write_rollouts, write_table
from agent_runtime.recording.messages import fold, last_of_each_branch
from agent_runtime.recording.segments import RecordCorrupt
from rollout_api.records import Result
from tests.support.recorded_run import FORKED, LOST, ROLLOUTS, TOOLS, record_run


async def test_every_field_of_every_result_is_in_the_file(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out")
    assert await write_rollouts(run, tmp_path / "run.parquet") == len(ROLLOUTS)
    for row, result in zip(pq.read_table(tmp_path / "run.parquet").to_pylist(), run.results(), strict=True):
        row.pop("conversations")
        texts = {"failedAttempts", "rewards", "usage", "lostUsage", "sandbox", "seconds", "plugins", "toolTracebacks"}
        read = {name: json.loads(cell) if name in texts else cell for name, cell in row.items()}
        assert Result.model_validate(read) == result


async def test_a_lost_rollout_has_no_reward_and_a_failed_one_has_0(tmp_path: Path) -> None:
    await write_rollouts(await record_run(tmp_path / "out"), tmp_path / "run.parquet")
    table = pq.read_table(tmp_path / "run.parquet")
    assert table["reward"].to_pylist() == [0.0, 1.0, None, None]
    assert table["outcome"].to_pylist() == ["Completed", "Completed", LOST["outcome"], LOST["outcome"]]
    assert table["mode"].to_pylist() == ["Eval", "Train", "Train", "Train"]


async def test_all_branches_of_a_rollout_are_in_its_row(tmp_path: Path) -> None:
    await write_rollouts(await record_run(tmp_path / "out"), tmp_path / "run.parquet")
    conversations = [json.loads(text) for text in pq.read_table(tmp_path / "run.parquet")["conversations"].to_pylist()]
    assert [len(branches) for branches in conversations] == [1, 2, 1, 0]
    expected = [{"messages": turn.conversation(), "tools": TOOLS} for turn in last_of_each_branch(fold(FORKED))]
    assert conversations[1] == expected


@pytest.mark.parametrize("count", [0, 1, ROW_GROUP, ROW_GROUP + 1])
async def test_no_row_is_lost_or_doubled_where_row_groups_meet(tmp_path: Path, count: int) -> None:
    async def rows() -> AsyncIterator[dict[str, Any]]:
        for number in range(count):
            yield {"n": number}

    file = tmp_path / "n.parquet"
    assert await write_table(file, lambda pa: pa.schema([("n", pa.int64())]), rows()) == count
    assert pq.read_table(file)["n"].to_pylist() == list(range(count))


async def test_damaged_run_leaves_no_complete_looking_file(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out")
    for segment in (tmp_path / "out" / run.folder / "attempts" / "1").rglob("*.jsonl.zst"):
        segment.write_bytes(b"damaged")
    with pytest.raises(RecordCorrupt):
        await write_rollouts(run, tmp_path / "run.parquet")
    assert [found.name for found in tmp_path.iterdir()] == ["out"]


async def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run = await record_run(tmp_path / "out")
    with pytest.raises(PyarrowMissing, match=r"install agent-rollouts\[parquet\]"):
        await write_rollouts(run, tmp_path / "run.parquet")
    assert not (tmp_path / "run.parquet").exists()
