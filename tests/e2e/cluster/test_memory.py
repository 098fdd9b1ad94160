"""Workspaces of one pod that may use more memory together than the pod has."""

from collections.abc import Callable

import pytest

from tests.support.cluster import Job, Object, eventually, small_job

HOLD = "python3 -c 'import time; kept = bytearray(b\"x\") * (150 << 20); time.sleep(3)' && touch solved"


@pytest.mark.full
def test_rollouts_wait_for_memory_and_none_is_lost(new_job: Callable[[Object], Job]) -> None:
    manifest = small_job("memory", groupSize=6, runners={"concurrency": 6})
    task = manifest["spec"]["tasks"]["inline"][0]
    task["solution"] = [HOLD]
    manifest["spec"]["sandbox"] |= {
        "workspaces": {"mode": "Overlay", "perSandbox": 6},
        "resources": {"memory": "256Mi", "memoryRequest": "80Mi"},
    }
    job = new_job(manifest).apply()
    [pod] = eventually(lambda: job.pods("sandbox") or None, 120, job.describe)
    # 6 × 80 MiB and the executor's own.
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "564Mi"
    job.wait("Succeeded")
    results = job.results()
    assert [(one["outcome"], one["reward"]) for one in results] == [("Completed", 1.0)] * 6
    # A machine that gives the executor no time may make the last resort necessary, which costs an attempt.
    reasons = [attempt["reason"] for one in results for attempt in one["failedAttempts"]]
    assert set(reasons) <= {"SandboxMemory"}
    assert len(reasons) < 6
