"""Jobs with large inline tasks on a real API server without nodes: how much etcd grows by runners' reports, and the
operator's memory.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_runtime.kube.api import KubeApi
from benchmarks.measuring import memory
from benchmarks.report import Row, Target
from tests.integration.operator_core.conftest import Replica
from tests.integration.operator_core.control_plane import ControlPlane, running, until

JOBS = 500
TASKS, PROMPT = 140, "x" * 1000
"""Inline tasks of one job: nearly the limit of 200 KB."""
RUNNERS, REPORTS, SECONDS_APART = 16, 600, 0.1
NAMESPACE = "jobs"
LIMIT_MIB = 512
"""The operator's memory limit in the chart."""
OLD_REPORTS_MB = 326
"""Megabytes by which etcd grew with 600 reports when a job's own status had them, before RolloutShards."""


def measure() -> list[Row]:
    """Return by how many megabytes 600 reports enlarge etcd, and the mebibytes of an operator with 500 jobs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for plane in running(folder, ("operator",)):
            return _measure(plane, folder)
    raise AssertionError("no control plane")


def _measure(plane: ControlPlane, folder: Path) -> list[Row]:
    plane.kubectl("create", "namespace", NAMESPACE)
    with _operator(plane, folder) as replica:
        _apply(plane, "reported")
        until(lambda: len(plane.names("rolloutshards", NAMESPACE)) == RUNNERS, "its shards")
        until(lambda: plane.get("job", "reported-runner", NAMESPACE), "its Job")
        before = _etcd_bytes(folder)
        asyncio.run(_report(plane))
        until(lambda: _sealed(plane) == REPORTS, "the sums")
        grown = _etcd_bytes(folder) - before
        for number in range(JOBS - 1):
            _apply(plane, f"job-{number}")
        until(lambda: len(plane.names("jobs", NAMESPACE)) == JOBS, "all Jobs", seconds=600)
        started = memory("VmHWM", replica.process.pid) / 2**20
    with _operator(plane, folder) as replica:
        until(lambda: replica.metric('rollout_workqueue_depth{name="RolloutJob"}') == 0, "all looked at", seconds=600)
        listed = memory("VmHWM", replica.process.pid) / 2**20
    what = f"{REPORTS} reports on a job of {len(_spec()) / 1e6:.2f} MB: growth of etcd"
    limit = Target("at most", LIMIT_MIB)
    return [
        Row(what, grown / 1e6, "MB", f"{OLD_REPORTS_MB} MB in the status of the job", OLD_REPORTS_MB / (grown / 1e6)),
        Row(f"the operator's peak memory, {JOBS} such jobs created", started, "MiB", target=limit),
        Row(f"the operator's peak memory, restarted with {JOBS} such jobs", listed, "MiB", target=limit),
    ]


@contextmanager
def _operator(plane: ControlPlane, folder: Path) -> Iterator[Replica]:
    replica = Replica(plane, NAMESPACE, "operator", folder)
    try:
        until(replica.leads, "the operator leads", seconds=600)
        yield replica
    finally:
        replica.process.kill()
        replica.process.wait()


def _spec() -> str:
    tasks = [{"name": f"task-{number}", "prompt": PROMPT} for number in range(TASKS)]
    spec: dict[str, Any] = {
        "tasks": {"inline": tasks},
        "agent": {"type": "Nop"},
        "sandbox": {"image": "localhost/none:1"},
        "runners": {"replicas": RUNNERS},
        "output": {"uri": "s3://bucket/results"},
    }
    return json.dumps(spec)


def _apply(plane: ControlPlane, name: str) -> None:
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
    }
    plane.kubectl("create", "-f", "-", text=json.dumps({**job, "spec": json.loads(_spec())}))


async def _report(plane: ControlPlane) -> None:
    names = sorted(name.partition("/")[2] for name in plane.names("rolloutshards", NAMESPACE))
    os.environ["KUBECONFIG"] = str(plane.kubeconfig("admin"))
    api = await KubeApi.connect(NAMESPACE)
    began = time.monotonic()
    for number in range(REPORTS):
        report = {
            "index": number % RUNNERS,
            "sealed": number // RUNNERS + 1,
            "running": 64,
            "rewarded": number // RUNNERS + 1,
        }
        await api.apply_report(names[number % RUNNERS], report)
        await asyncio.sleep(max(0.0, began + (number + 1) * SECONDS_APART - time.monotonic()))
    await api.close()


def _sealed(plane: ControlPlane) -> int:
    job = plane.get("rolloutjob", "reported", NAMESPACE)
    return int((job or {}).get("status", {}).get("sealed") or 0)


def _etcd_bytes(folder: Path) -> int:
    return (folder / "etcd/member/snap/db").stat().st_size
