"""`rolloutctl submit` against a real API server: the applied job equals the manifest."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operator_core.control_plane import REPOSITORY, ControlPlane
from tests.support.s3 import S3, serve_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serve_s3() as server:
        yield server


def test_a_job_with_local_tasks_arrives_once_and_a_changed_one_is_refused(
    plane: ControlPlane, s3: S3, tmp_path: Path
) -> None:
    plane.kubectl("create", "namespace", "submitted")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"name": "a", "prompt": "p"}))
    env = [{"name": "GREETING", "value": "😀 \x7f"}]  # YAML parsers refuse what Python's JSON makes of these
    job: dict[str, Any] = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "job"},
        "spec": {
            "tasks": {"from": {"uri": "tasks.jsonl", "filter": {"name": ["a"]}}},
            "agent": {"type": "Nop"},
            "sandbox": {"image": "localhost/python:1", "env": env},
            "output": {"uri": s3.uri("submitted"), "secretRef": "store"},
        },
    }

    def submit() -> subprocess.CompletedProcess[str]:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        return subprocess.run(
            [sys.executable, "-m", "rolloutctl.main", "submit", str(tmp_path / "job.yaml"), "-n", "submitted"],
            cwd=REPOSITORY,
            env={**os.environ, **s3.environ(), "KUBECONFIG": str(plane.kubeconfig("admin"))},
            capture_output=True,
            text=True,
            check=False,
        )

    for told in ("Uploaded 1 of 1 files: s3://", "Already uploaded: s3://"):
        done = submit()
        assert done.returncode == 0, done.stderr
        assert told in done.stderr
        assert "rolloutjob/job applied in namespace submitted" in done.stderr
    found = plane.get("rolloutjobs", "job", "submitted")
    assert found is not None
    assert found["spec"]["tasks"]["from"]["uri"].startswith(s3.uri("submitted/sources/"))
    assert found["spec"]["tasks"]["from"]["filter"] == {"name": ["a"]}
    assert found["spec"]["sandbox"]["env"] == env
    assert found["metadata"]["generation"] == 1
    job["spec"]["groupSize"] = 2
    refused = submit()
    assert refused.returncode == 1
    assert "cannot be changed; delete the job and create another" in refused.stderr
