"""Task files in object storage, read from a real S3 server on loopback."""

import asyncio
import io
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from agent_runtime.engine.branching.sources import find_origins
from agent_runtime.runner.shard_run import ending_of
from agent_runtime.runner.supervisor import Exit
from agent_runtime.tasks import TaskSourceError, TaskSourceUnavailable, folders, load_tasks, place
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Tasks
from tests.support.harbor_tasks import hello_world
from tests.support.s3 import BUCKET, S3, serve_s3


def store_of(server: S3) -> S3Store:
    """Return the test's bucket, to write to."""
    return S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{server.port}",
        access_key_id="test",
        secret_access_key="test-secret",
        region="us-east-1",
        client_options={"allow_http": True},
    )


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serve_s3() as server:
        store = store_of(server)
        rows = "".join(f'{{"name": "t{number}", "prompt": "p"}}\n' for number in range(5000))
        obstore.put(store, "data/tasks.jsonl", rows.encode())
        parquet = io.BytesIO()
        pq.write_table(pa.table({"name": ["a", "b"], "prompt": ["p", "q"], "other": [1, 2]}), parquet)
        obstore.put(store, "data/tasks.parquet", parquet.getvalue())
        obstore.put(store, "data/broken.parquet", parquet.getvalue()[:-20])
        wide = io.BytesIO()
        names = [f"t{number}" for number in range(100)]
        other = [random.randbytes(20_000) for _ in names]
        pq.write_table(pa.table({"name": names, "prompt": names, "other": other}), wide, row_group_size=5)
        obstore.put(store, "data/wide.parquet", wide.getvalue())
        yield server


def source(uri: str) -> Tasks:
    return Tasks.model_validate({"from": {"uri": uri}})


def test_tasks_are_read_in_order(s3: S3, tmp_path: Path) -> None:
    tasks = load_tasks(source(s3.uri("data/tasks.jsonl")), tmp_path, s3.environ()).tasks
    assert [task.name for task in tasks] == [f"t{number}" for number in range(5000)]


def test_parquet_is_read_from_object_storage(s3: S3, tmp_path: Path) -> None:
    tasks = Tasks.model_validate({"from": {"uri": s3.uri("data/tasks.parquet"), "columns": {"prompt": "prompt"}}})
    assert [(task.name, task.prompt) for task in load_tasks(tasks, tmp_path, s3.environ()).tasks] == [
        ("a", "p"),
        ("b", "q"),
    ]
    with pytest.raises(TaskSourceError, match="it is not a readable Parquet file"):
        load_tasks(source(s3.uri("data/broken.parquet")), tmp_path, s3.environ())


def test_only_the_columns_of_parquet_that_are_needed_are_fetched(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, get = list[int](), obstore.get

    def counted(store: Any, name: str, *, options: Any) -> Any:
        start, end = options["range"]
        fetched.append(end - start)
        return get(store, name, options=options)

    monkeypatch.setattr(obstore, "get", counted)
    tasks = Tasks.model_validate({"from": {"uri": s3.uri("data/wide.parquet"), "columns": {"prompt": "prompt"}}})
    assert len(load_tasks(tasks, tmp_path, s3.environ()).tasks) == 100
    assert 0 < sum(fetched) < 200_000  # of 2 MB


def test_object_that_is_replaced_while_it_is_read_gives_no_mixture(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, get = store_of(s3), obstore.get
    old, new = (b'{"name": "t", "prompt": "%s"}\n' % (text * 100) for text in (b"old", b"new"))
    obstore.put(store, "data/replaced.jsonl", old)

    def replacing(store: Any, name: str, *, options: Any) -> Any:
        found = get(store, name, options=options)
        obstore.put(store, name, new)
        return found

    monkeypatch.setattr(obstore, "get", replacing)
    monkeypatch.setattr(place, "CHUNK_BYTES", 100)
    with pytest.raises(TaskSourceUnavailable, match="replaced while it was read"):
        load_tasks(source(s3.uri("data/replaced.jsonl")), tmp_path, s3.environ())
    monkeypatch.undo()
    (task,) = load_tasks(source(s3.uri("data/replaced.jsonl")), tmp_path, s3.environ()).tasks
    assert task.prompt == "new" * 100


def test_missing_object_and_wrong_key_are_reported_with_the_uri(s3: S3, tmp_path: Path) -> None:
    wrong = s3.environ() | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    for environ, form in itertools.product((s3.environ(), wrong), ("jsonl", "parquet")):
        uri = s3.uri(f"data/other.{form}")
        with pytest.raises(TaskSourceError, match="cannot be read") as caught:
            load_tasks(source(uri), tmp_path, environ)
        assert str(caught.value).startswith(uri)


@pytest.mark.parametrize("uri", ["data/tasks.jsonl", "data/tasks.parquet", "data"])
def test_runner_is_tried_again_when_storage_refuses_its_tasks(s3: S3, tmp_path: Path, uri: str) -> None:
    form = {"format": "Harbor"} if uri == "data" else {}
    tasks = Tasks.model_validate({"from": {"uri": s3.uri(uri), **form}})
    with pytest.raises(TaskSourceUnavailable) as refused:
        load_tasks(tasks, tmp_path, s3.environ() | {"AWS_SECRET_ACCESS_KEY": "wrong"})
    with pytest.raises(TaskSourceError) as missing:
        load_tasks(source(s3.uri("data/other.jsonl")), tmp_path, s3.environ())
    assert [ending and ending.exit for ending in map(ending_of, (refused.value, missing.value))] == [
        Exit.STORAGE,
        Exit.BAD_JOB,
    ]


def test_runner_is_tried_again_when_storage_refuses_the_run_to_branch(s3: S3, tmp_path: Path) -> None:
    spec = {
        "mode": "Eval",
        "tasks": {"branch": [{"job": s3.uri("runs/source"), "index": 0, "turn": 0, "count": 2}]},
        "model": {"function": "models:unused"},
        "output": {"uri": s3.uri("runs")},
    }
    job = RolloutJob.model_validate(
        {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "again"}, "spec": spec}
    )
    with pytest.raises(TaskSourceUnavailable):
        asyncio.run(find_origins(job, tmp_path, s3.environ() | {"AWS_SECRET_ACCESS_KEY": "wrong"}))


def test_folder_with_too_large_a_file_is_left_out_like_any_other(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "FILE_BYTES", 4096)
    store = store_of(s3)
    for name, bytes_ in (("small", 10), ("large", 5000)):
        for path in hello_world(tmp_path / name).rglob("*"):
            if path.is_file():
                obstore.put(store, f"sizes/{name}/{path.relative_to(tmp_path / name)}", path.read_bytes())
        obstore.put(store, f"sizes/{name}/tests/data", bytes(bytes_))
    from_ = {"uri": s3.uri("sizes/"), "format": "Harbor", "skipUnusable": True}
    loaded = load_tasks(Tasks.model_validate({"from": from_}), tmp_path, s3.environ())
    assert [task.name for task in loaded.tasks] == ["small"]
    assert "5000 bytes; the limit is 4096" in str(loaded.warnings[0])
