"""Harbor folders as rows of verl's data."""

import os
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.integrations.harbor_server.dataset import (
    CACHE,
    alike,
    file_name,
    harbor_files,
    rows_of,
    write_dataset,
)
from agent_runtime.tasks import TaskSourceError
from rolloutctl.commands import dataset as command
from tests.support.harbor_tasks import write_folder


def task(folder: Path, metadata: str = 'difficulty = "easy"') -> Path:
    config = f'schema_version = "1.4"\n[metadata]\n{metadata}\n'
    return write_folder(folder, {"task.toml": config, "instruction.md": f"Do {folder.name}.\n"})


def test_a_row_has_the_columns_that_a_dataset_of_pr_83_has(tmp_path: Path) -> None:
    folder = task(tmp_path / "one")

    file = write_dataset(tmp_path, split="train", cache_dir=tmp_path / "cache")

    assert pq.read_table(file).to_pylist() == [
        {
            "data_source": "harbor",
            "prompt": [{"role": "user", "content": "Do one.\n"}],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": "one"},
            "extra_info": {
                "split": "train",
                "index": 0,
                "task_id": "one",
                "local_path": str(folder),
                "task_metadata": {"difficulty": "easy"},
            },
            "instance_id": "one",
            "local_task_path": str(folder),
        }
    ]


def test_dataset_takes_files_that_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = task(tmp_path / "one")
    for name in ("task.toml", "instruction.md"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    (row,) = rows_of(tmp_path, split="train")
    assert row["prompt"] == [{"role": "user", "content": "Do one.\n"}]


def test_tasks_in_folders_of_folders_are_in_the_dataset(tmp_path: Path) -> None:
    for name in ("b", "a/deep/c", "a/d"):
        task(tmp_path / name)
    task(tmp_path / "b" / "tests" / "inner")

    assert [row["instance_id"] for row in rows_of(tmp_path, split="train")] == ["d", "c", "b"]


def test_a_file_that_pr_83_has_written_is_found_again(tmp_path: Path) -> None:
    assert file_name(Path("/data/tasks"), "val", 10) == "val-f4ed9c428f.parquet"


def test_a_dataset_is_written_once_and_again_when_a_task_has_changed(tmp_path: Path) -> None:
    folder = task(tmp_path / "tasks" / "one")
    file = write_dataset(tmp_path / "tasks", split="train", cache_dir=tmp_path)
    first = file.stat().st_mtime_ns
    assert write_dataset(tmp_path / "tasks", split="train", cache_dir=tmp_path).stat().st_mtime_ns == first

    (folder / "instruction.md").write_text("Do more.\n")
    later = file.stat().st_mtime + 10
    os.utime(folder / "instruction.md", (later, later))

    (row,) = pq.read_table(write_dataset(tmp_path / "tasks", split="train", cache_dir=tmp_path)).to_pylist()
    assert row["prompt"][0]["content"] == "Do more.\n"


def test_dataset_of_another_data_source_or_ability_is_another_file(tmp_path: Path) -> None:
    task(tmp_path / "tasks" / "one")
    wanted = [("one", "agent"), ("two", "agent"), ("two", "code")]
    files = [
        write_dataset(tmp_path / "tasks", split="train", cache_dir=tmp_path, data_source=source, ability=ability)
        for source, ability in wanted
    ]
    rows = [pq.read_table(file).to_pylist()[0] for file in files]
    assert [(row["data_source"], row["ability"]) for row in rows] == wanted


def test_command_and_trainer_keep_datasets_in_the_same_folder() -> None:
    assert Path(CACHE) == command.CACHE


def test_verls_own_keys_make_the_files_that_it_trains_on(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        task(tmp_path / "tasks" / name)
    data = {
        "train_harbor_dir": str(tmp_path / "tasks"),
        "val_harbor_dir": None,
        "harbor_cache_dir": str(tmp_path / "cache"),
        "harbor_data_source": "mine",
        "harbor_ability": "code",
        "harbor_train_limit": 2,
        "train_files": ["other.parquet"],
    }

    found = harbor_files({"data": data})

    assert list(found) == ["train_files"]
    rows = pq.read_table(found["train_files"]).to_pylist()
    assert [(row["instance_id"], row["data_source"], row["ability"]) for row in rows] == [
        ("a", "mine", "code"),
        ("b", "mine", "code"),
    ]


def test_every_invalid_task_is_reported(tmp_path: Path) -> None:
    task(tmp_path / "x" / "same")
    task(tmp_path / "y" / "same")
    task(tmp_path / "broken", metadata="difficulty =")
    (task(tmp_path / "odd") / "task.toml").write_text("metadata = 3\n")

    with pytest.raises(TaskSourceError) as refused:
        rows_of(tmp_path, split="train")

    assert len(refused.value.problems) == 3
    assert "odd: task.toml: metadata is 3, expected a table" in str(refused.value)
    assert "instance_id must be unique" in str(refused.value)


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.text(max_size=5),
    st.integers(-(2**60), 2**60),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dates(),
    st.lists(st.one_of(st.text(max_size=3), st.integers(0, 9)), max_size=3),
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 9), max_size=2),
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=4))
def test_metadata_of_any_types_fits_into_one_table_and_keeps_its_keys(tables: list[dict[str, Any]]) -> None:
    import pyarrow as pa

    found = pa.Table.from_pylist([{"metadata": table} for table in alike(tables)]).to_pylist()

    for table, row in zip(tables, found, strict=True):
        kept = {} if row["metadata"] is None else row["metadata"]
        assert {key for key, value in kept.items() if value is not None} == set(table)


def test_metadata_of_one_type_are_not_changed() -> None:
    assert alike([{"a": 1, "tags": ["x"]}, {"a": 2, "on": date(2026, 1, 2)}]) == [
        {"a": 1, "on": None, "tags": ["x"]},
        {"a": 2, "on": "2026-01-02", "tags": None},
    ]
