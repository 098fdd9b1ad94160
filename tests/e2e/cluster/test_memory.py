"""Workspaces of one pod that may use more memory together than the pod has."""

from collections.abc import Callable

import pytest

from tests.support.cluster import Cluster, Job, Object, eventually, small_job

HOLD = "python3 -c 'import time; kept = bytearray(b\"x\") * (150 << 20); time.sleep(3)' && touch solved"

# Fills a shared mapping, and removes the pages from its own page table. No figure of the process shows them.
HIDE = """import ctypes, mmap, time
count, step = 600 << 20, 4096 * 2000
shared = mmap.mmap(-1, count, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(shared))
for at in range(0, count - step, step):
    ctypes.memset(start + at, 1, step)
    shared.madvise(mmap.MADV_DONTNEED, at, step)
time.sleep(20)
"""


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


@pytest.mark.full
def test_memory_that_a_program_hides_is_its_own_fault_at_a_retry_and_costs_others_attempts_alone(
    new_job: Callable[[Object], Job],
) -> None:
    manifest = small_job("hides", 2, groupSize=3, runners={"concurrency": 6})
    honest, hides = manifest["spec"]["tasks"]["inline"]
    honest["solution"] = ["sleep 15; touch solved"]
    hides["solution"] = [f"sleep 3; python3 -c '{HIDE}'; touch solved"]
    manifest["spec"]["sandbox"] |= {
        "workspaces": {"mode": "Overlay", "perSandbox": 6},
        "resources": {"memory": "128Mi"},
    }
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    results = job.results()
    assert [(one["outcome"], one["reward"]) for one in results if one["group"] == 0] == [("Completed", 1.0)] * 3
    hidden = [one for one in results if one["group"] == 1]
    assert [one["outcome"] for one in hidden] == ["Completed"] * 3
    # In a shared sandbox hidden memory counts only while memory is short; at a retry, alone, against the own limit.
    stops = [one["stopReason"] for one in hidden]
    assert "ResourceLimit" in stops, hidden
    assert set(stops) <= {"ResourceLimit", "Finished"}, hidden
    reasons = {attempt["reason"] for one in results for attempt in one["failedAttempts"]}
    assert reasons <= {"SandboxMemory"}, reasons


@pytest.mark.full
def test_all_that_ran_are_tried_again_if_the_kernel_ends_a_process(
    cluster: Cluster, new_job: Callable[[Object], Job]
) -> None:
    manifest = small_job("killed", groupSize=2, runners={"concurrency": 2})
    manifest["spec"]["tasks"]["inline"][0]["solution"] = ["sleep 20; touch solved"]
    manifest["spec"]["sandbox"] |= {
        "workspaces": {"mode": "Overlay", "perSandbox": 2},
        "resources": {"memory": "128Mi"},
    }
    job = new_job(manifest).apply()
    [pod] = eventually(lambda: job.pods("sandbox") or None, 120, job.describe)
    name = pod["metadata"]["name"]

    def sleep_runs() -> bool | None:
        shown = cluster.kubectl(
            "exec", "-n", job.namespace, name, "--", "sh", "-c", "cat /proc/[0-9]*/comm", check=False
        )
        return shown.stdout.split().count("sleep") >= 2 or None

    eventually(sleep_runs, 120, job.describe)
    allocate = (
        "import os\nkept = []\nif not os.fork():\n    while True:\n        kept.append(bytearray(50 << 20))\nos.wait()"
    )
    cluster.kubectl("exec", "-n", job.namespace, name, "--", "python3", "-c", allocate)
    job.wait("Succeeded")
    results = job.results()
    assert [(one["outcome"], one["reward"]) for one in results] == [("Completed", 1.0)] * 2, results
    assert [attempt["reason"] for one in results for attempt in one["failedAttempts"]] == ["SandboxMemory"] * 2
