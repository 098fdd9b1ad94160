"""A runner that is started with wrong settings names what is missing, and runs nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.runner.start import BadStart, read_start

INDEX = {"JOB_COMPLETION_INDEX": "1"}


def write(folder: Path, **metadata: Any) -> None:
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "j", "namespace": "n", "uid": "u", **metadata},
        "spec": {
            "agent": {"type": "Nop"},
            "tasks": {"inline": [{"name": "t", "prompt": "p"}]},
            "runners": {"replicas": 2},
            "output": {"uri": "s3://b"},
        },
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "key").write_text("ab" * 32 + "\n")


def test_job_key_and_shard_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    start = read_start(tmp_path, INDEX)
    assert (start.job.metadata.name, start.key, start.shard) == ("j", "ab" * 32, Shard(1, 2))


@pytest.mark.parametrize("index", [None, "", "2", "-1", "one"])
def test_an_index_that_no_shard_has_is_refused(tmp_path: Path, index: str | None) -> None:
    write(tmp_path)
    with pytest.raises(BadStart, match=r"JOB_COMPLETION_INDEX .* expected 0 to 1"):
        read_start(tmp_path, {} if index is None else {"JOB_COMPLETION_INDEX": index})


def test_a_missing_file_and_a_field_of_another_version_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadStart, match=r"job\.json cannot be read"):
        read_start(tmp_path, INDEX)
    write(tmp_path)
    job = json.loads((tmp_path / "job.json").read_text())
    job["spec"]["fromTheFuture"] = True
    (tmp_path / "job.json").write_text(json.dumps(job))
    with pytest.raises(BadStart, match=r"spec\.fromTheFuture.*image of the operator's version"):
        read_start(tmp_path, INDEX)


def test_job_without_its_uid_is_refused(tmp_path: Path) -> None:
    write(tmp_path, uid=None)
    with pytest.raises(BadStart, match=r"metadata\.uid"):
        read_start(tmp_path, INDEX)
