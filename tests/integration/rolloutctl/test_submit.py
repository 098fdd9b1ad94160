"""`rolloutctl submit` without a cluster: local files that a cluster cannot see are uploaded."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.store import Store
from agent_runtime.tasks import TaskSourceError, load_tasks
from agent_runtime.tasks.folders import EXECUTABLES
from agent_runtime.tasks.source import needed_images
from rollout_api.manifest import load_manifest
from rollout_api.tasks import Tasks
from rolloutctl.sources import local_source, upload, with_uri
from tests.support.harbor_tasks import hello_world
from tests.support.preloaded import run_rolloutctl
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
    return run_rolloutctl("submit", str(path), *arguments, folder=path.parent, environ=environ)


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
    moved = with_uri(job, f"{job.spec.output.uri}/{source.key}")
    assert [task.name for task in load_tasks(moved.spec.tasks, Path("/nowhere"), s3.environ()).tasks] == ["t0"]


async def test_changed_content_is_uploaded_to_another_place_and_a_folder_keeps_its_form(s3: S3, tmp_path: Path) -> None:
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


def seen(tasks: Tasks, base_dir: Path, environ: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of images and the modes of files in a job's task folders."""
    images = [build.image for build in needed_images(tasks, base_dir, environ)]
    loaded = load_tasks(tasks, base_dir, environ).tasks
    assert [task.sandbox.image for task in loaded if task.sandbox] == images
    return images, dict(file for task in loaded for file in modes(task.wire()))


def modes(value: Any) -> Iterator[tuple[str, str]]:
    """Return the modes of all files of a task, by path."""
    if isinstance(value, dict) and "contentBase64" in value:
        yield value["path"], value["mode"]
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from modes(part)


@pytest.mark.parametrize("uri", ["set", "set/one", "link"])
async def test_programs_of_a_task_stay_programs_and_its_image_keeps_its_name_after_the_upload(
    uri: str, s3: S3, tmp_path: Path
) -> None:
    """The mode is a part of the image's digest. Otherwise `images` here and a runner there would look for different
    images.
    """
    program = b"\x7fELF no script"
    paths = ["environment/tool {1}", "tests/helper", "solution/helper"]
    hello_world(tmp_path / "set/one", **dict.fromkeys(paths, program), **{"tests/data": program})
    for path in paths:
        (tmp_path / "set/one" / path).chmod(0o755)
    (tmp_path / "link").symlink_to("set/one")
    job = load_manifest(manifest(tmp_path, s3.uri("jobs"), {"uri": uri, "format": "Harbor"}))
    tasks = job.spec.tasks.model_copy(update={"image_template": "r.example/{name}:{digest}"})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": tasks})})
    here = seen(job.spec.tasks, tmp_path, {})
    assert [here[1][path] for path in ("/tests/helper", "/solution/helper", "/tests/data")] == ["755", "755", "644"]
    source = local_source(job, tmp_path)
    assert source is not None
    store = Store.open(job.spec.output.uri, s3.environ())
    await upload(source, store)
    moved = with_uri(job, f"{job.spec.output.uri}/{source.key}")
    assert seen(moved.spec.tasks, Path("/nowhere"), s3.environ()) == here
    # Files fetched from there, without modes, are the same source, also when they are uploaded again.
    back = tmp_path / "back" / Path(source.key).name
    for meta in await store.list(source.key):
        file = back / meta.key.removeprefix(f"{source.key}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(await store.get(meta.key) or b"")
    fetched = with_uri(job, str(back))
    assert seen(fetched.spec.tasks, tmp_path, {}) == here
    again = local_source(fetched, tmp_path)
    assert again is not None
    assert again.key == source.key


def test_executable_file_is_another_upload_than_the_same_bytes_as_data(s3: S3, tmp_path: Path) -> None:
    job = load_manifest(manifest(tmp_path, s3.uri("jobs"), {"uri": "set", "format": "Harbor"}))
    hello_world(tmp_path / "set/one", **{"tests/helper": "x"})
    data = local_source(job, tmp_path)
    (tmp_path / "set/one/tests/helper").chmod(0o755)
    program = local_source(job, tmp_path)
    assert data is not None
    assert program is not None
    assert (data.executables, program.executables) == ([], ["one/tests/helper"])
    assert data.key != program.key


@pytest.mark.parametrize("text", ["one/tests/helper", '{"one": 1}', "[1]"])
def test_invalid_list_of_executables_is_reported_with_its_file(text: str, tmp_path: Path) -> None:
    job = load_manifest(manifest(tmp_path, "s3://bucket/jobs", {"uri": "set", "format": "Harbor"}))
    hello_world(tmp_path / "set/one")
    (tmp_path / "set" / EXECUTABLES).write_text(text)
    with pytest.raises(TaskSourceError, match=r"set/\.executables\.json: expected a JSON list of paths"):
        load_tasks(job.spec.tasks, tmp_path, {})


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
        ("out", "tasks.jsonl", "spec.output.uri is the local folder 'out', but tasks are uploaded to the output"),
        ("s3://bucket/jobs", "missing.jsonl", "missing.jsonl: no such file or folder; correct spec.tasks.from.uri"),
        ("s3://bucket/jobs", "broken.jsonl", "broken.jsonl:1: prompt: is missing"),
    ],
)
def test_a_job_that_cannot_work_in_the_cluster_is_refused_before_any_upload(
    output: str, source: str, message: str, tmp_path: Path
) -> None:
    rows(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"name": "a"}\n')
    refused = submit(manifest(tmp_path, output, {"uri": source}), AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert refused.returncode == 2
    assert message in refused.stderr
