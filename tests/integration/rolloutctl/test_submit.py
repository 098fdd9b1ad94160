"""`rolloutctl submit` without a cluster: what of this machine a cluster could not see is brought to where it can."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.tasks import load_tasks
from rollout_api.manifest import load_manifest
from rolloutctl.sources import local_source, upload, with_source
from rolloutctl.submit import Store
from tests.support.s3 import S3, serve_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serve_s3() as server:
        yield server


def manifest(folder: Path, output: str, source: dict[str, Any]) -> Path:
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "submitted"},
        "spec": {"tasks": {"from": source}, "agent": {"type": "Nop"}, "output": {"uri": output}},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def submit(path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rolloutctl.main", "submit", str(path), *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def rows(folder: Path, count: int = 2) -> None:
    (folder / "tasks.jsonl").write_text(
        "".join(f"{json.dumps({'name': f't{number}', 'prompt': 'p'})}\n" for number in range(count))
    )


async def test_uploaded_tasks_are_read_from_where_the_job_then_points(s3: S3, tmp_path: Path) -> None:
    rows(tmp_path)
    job = load_manifest(manifest(tmp_path, s3.uri("jobs"), {"uri": "tasks.jsonl", "limit": 1}))
    source = local_source(job, tmp_path)
    assert source is not None
    store = Store.open(job.spec.output.uri, s3.environ())
    assert [await upload(source, store), await upload(source, store)] == [1, 0]
    moved = with_source(job, f"{job.spec.output.uri}/{source.key}")
    assert [task.name for task in load_tasks(moved.spec.tasks, Path("/nowhere"), s3.environ()).tasks] == ["t0"]


async def test_other_content_has_another_place_and_a_folder_keeps_its_form(s3: S3, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "task.toml").write_text("x = 1\n")
    job = load_manifest(manifest(tmp_path, s3.uri("jobs"), {"uri": "set", "format": "Harbor"}))
    first = local_source(job, tmp_path)
    (folder / "a" / "task.toml").write_text("x = 2\n")
    second = local_source(job, tmp_path)
    assert first is not None
    assert second is not None
    assert first.key.endswith("/set")
    assert first.key != second.key
    assert [key for key, _ in second.files] == [f"{second.key}/a/task.toml"]
    store = Store.open(job.spec.output.uri, s3.environ())
    assert await upload(second, store) == 1
    assert await store.get(f"{second.key}/a/task.toml") == b"x = 2\n"


def test_a_dry_run_prints_the_manifest_and_touches_nothing(tmp_path: Path) -> None:
    rows(tmp_path)
    nobody = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "KUBECONFIG": "/nonexistent"}
    printed = submit(manifest(tmp_path, "s3://bucket/jobs", {"uri": "tasks.jsonl"}), "--dry-run", **nobody)
    assert printed.returncode == 0, printed.stderr
    uri = yaml.safe_load(printed.stdout)["spec"]["tasks"]["from"]["uri"]
    assert uri.startswith("s3://bucket/jobs/sources/")
    assert uri.endswith("/tasks.jsonl")


@pytest.mark.parametrize(
    ("output", "source", "message"),
    [
        ("out", "tasks.jsonl", "spec.output.uri is the local folder 'out', and the tasks go where the results go"),
        ("s3://bucket/jobs", "missing.jsonl", "missing.jsonl: cannot be read: No such file or directory"),
        ("s3://bucket/jobs", "broken.jsonl", "broken.jsonl:1: prompt: is missing"),
    ],
)
def test_what_cannot_work_in_the_cluster_is_refused_before_anything_is_uploaded(
    output: str, source: str, message: str, tmp_path: Path
) -> None:
    rows(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"name": "a"}\n')
    refused = submit(manifest(tmp_path, output, {"uri": source}), AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert refused.returncode == 2
    assert message in refused.stderr
