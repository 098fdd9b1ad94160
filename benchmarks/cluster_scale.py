"""The operator with thousands of Sandboxes on simulated nodes (kwok): speed, memory, and stability."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent_runtime.kube.api import KubeApi
from agent_runtime.sandboxes.cluster.sandbox_object import new_name, sandbox_object
from benchmarks.conversation import ROOT
from benchmarks.measuring import cpu_seconds, memory
from benchmarks.on_cluster import AuditLog, harness_cluster, new_namespace, of_sandboxes, open_job, operator_kubeconfig
from benchmarks.report import Row, Target, comparison
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import SandboxSpec
from tests.support.cluster import OPERATOR_NAMESPACE, QUICKSTART_IMAGE, Cluster, Job, eventually
from tests.support.ports import free_ports

FEW, MANY = 500, 5_000
NODES = 50
RUNNER = 1  # runner index of the Sandboxes; the job's real runner is 0 and has none
CREATES_AT_ONCE = 16
POLL_SECONDS = 1.0
START_SECONDS, READY_SECONDS = 120.0, 1200.0
RELEASE = "agent-rollouts"
ON_KWOK = {
    "nodeSelector": {"type": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
}


@dataclass(frozen=True)
class Filled:
    """Timing of Sandboxes that were created and became Ready."""

    count: int
    created_seconds: float
    """Seconds until the last one was created."""
    ready_seconds: float
    """Seconds from the first creation until all were Ready."""
    writes: Counter[str]
    reconcile_p99: float
    peak_bytes: int
    cpu_seconds: float


def measure() -> list[Row]:
    """Return time, memory, reconcile time and writes with many Sandboxes, compared with few."""
    cluster = harness_cluster()
    with _simulated_nodes(cluster), _without_installed_operator(cluster), tempfile.TemporaryDirectory() as folder:
        with new_namespace(cluster) as namespace, Operator(cluster, Path(folder)) as operator:
            few = _fill(cluster, namespace, operator, FEW)
        with new_namespace(cluster) as namespace:
            with Operator(cluster, Path(folder)) as operator:
                many = _fill(cluster, namespace, operator, MANY)
            with Operator(cluster, Path(folder)) as operator:
                restarted, restarted_bytes = operator.synced_seconds, operator.peak_bytes()
    return [*_rows(few, many), *_restart_rows(restarted, restarted_bytes)]


def _rows(few: Filled, many: Filled) -> list[Row]:
    writes, before = (of_sandboxes(run.writes) / run.count for run in (many, few))
    slow, quick = (run.reconcile_p99 * 1e3 for run in (many, few))
    return [
        Row(
            f"{MANY:,} Sandboxes created and all Ready",
            many.ready_seconds,
            "s",
            f"creating them took {many.created_seconds:.0f} s",
            target=Target("at most", 200),
        ),
        Row("resident memory at most", many.peak_bytes / 1e6, "MB", target=Target("at most", 250)),
        Row("processor time of the operator", many.cpu_seconds, "s"),
        comparison(f"reconcile p99 with {MANY:,}", slow, "ms", f"with {FEW}", quick, Target("at most", 2)),
        comparison(f"API writes for each of {MANY:,}", writes, "writes", f"of {FEW}", before, Target("at most", 1.05)),
    ]


def _restart_rows(seconds: float, peak_bytes: int) -> list[Row]:
    return [
        Row(f"started beside {MANY:,}, until its cache is complete", seconds, "s", target=Target("at most", 10)),
        Row("resident memory then", peak_bytes / 1e6, "MB", target=Target("at most", 250)),
    ]


class Operator:
    """`python -m rollout_operator` as a local process. As a context manager, it waits until the operator's cache is
    complete.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        found = cluster.get("configmap", RELEASE, OPERATOR_NAMESPACE)
        if found is None:
            raise RuntimeError(f"the chart is not installed in namespace {OPERATOR_NAMESPACE}: hack/install-on-cluster")
        (text,) = found["data"].values()
        self._port, health = free_ports(2)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(yaml.safe_load(text) | {"metricsPort": self._port, "healthPort": health}))
        self._environ = {
            "ROLLOUT_OPERATOR_CONFIG": str(config),
            "KUBECONFIG": str(operator_kubeconfig(cluster, folder / "kubeconfig")),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT)]),
        }
        self._log = folder / "log"
        self.synced_seconds = 0.0

    def __enter__(self) -> "Operator":
        started = time.monotonic()
        command = [sys.executable, "-m", "rollout_operator"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=os.environ | self._environ, stdout=log, stderr=log)
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - started > START_SECONDS:
                self.__exit__()
                raise RuntimeError(f"the operator did not start: {self._log.read_text()[-3000:]}")
            time.sleep(0.05)
        self.synced_seconds = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as reply:
            text = reply.read().decode()
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found

    def ready(self) -> int:
        """Return the number of Ready Sandboxes in the API server."""
        return int(self.metrics().get("rollout_sandboxes", {}).get((("state", "Ready"),), 0))

    def reconcile_p99(self) -> float:
        """Return seconds, interpolated within the histogram's bucket as in Prometheus."""
        buckets = self.metrics()["rollout_controller_reconcile_time_seconds_bucket"]
        counts = sorted(
            (float(dict(labels)["le"]), count)
            for labels, count in buckets.items()
            if dict(labels)["controller"] == "Sandbox"
        )
        return interpolated(counts, 0.99)

    def peak_bytes(self) -> int:
        return memory("VmHWM", self._process.pid)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def interpolated(buckets: list[tuple[float, float]], fraction: float) -> float:
    """Return a quantile of a cumulative histogram: pairs of upper bound and count in order, the last bound infinite."""
    wanted = buckets[-1][1] * fraction
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    raise ValueError("no values were measured")


def _fill(cluster: Cluster, namespace: str, operator: Operator, count: int) -> Filled:
    job = open_job(cluster, namespace, podTemplate={"spec": ON_KWOK})
    audit, cpu = AuditLog(cluster), operator.cpu_seconds()
    before = audit.writes(namespace)
    started = time.monotonic()
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)  # KubeApi reads it outside a pod
    asyncio.run(_create(job, namespace, count))
    created = time.monotonic() - started
    while operator.ready() < count:
        if time.monotonic() - started > READY_SECONDS:
            raise RuntimeError(f"{operator.ready()} of {count} Sandboxes are Ready after {READY_SECONDS} s")
        time.sleep(POLL_SECONDS)
    return Filled(
        count=count,
        created_seconds=created,
        ready_seconds=time.monotonic() - started,
        writes=audit.writes(namespace) - before,
        reconcile_p99=operator.reconcile_p99(),
        peak_bytes=operator.peak_bytes(),
        cpu_seconds=operator.cpu_seconds() - cpu,
    )


async def _create(job: Job, namespace: str, count: int) -> None:
    found: dict[str, Any] = {key: value for key, value in job.object.items() if key != "status"}
    owner = RolloutJob.model_validate(found)
    # Like the job's own Sandboxes, except that these have a pod template of their own.
    spec = SandboxSpec(image=QUICKSTART_IMAGE, workspaces=owner.spec.sandbox.workspaces)
    api = await KubeApi.connect(namespace)
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await api.create_sandbox(sandbox_object(owner, RUNNER, new_name(job.name, RUNNER), spec))

    try:
        await asyncio.gather(*(work() for _ in range(CREATES_AT_ONCE)))
    finally:
        await api.close()


@contextlib.contextmanager
def _simulated_nodes(cluster: Cluster) -> Iterator[None]:
    cluster.node_process("kwok", "up", "--nodes", str(NODES))
    try:
        yield
    finally:
        cluster.node_process("kwok", "down")


@contextlib.contextmanager
def _without_installed_operator(cluster: Cluster) -> Iterator[None]:
    found = cluster.get("deployment", RELEASE, OPERATOR_NAMESPACE)
    if found is None:
        raise RuntimeError(f"the chart is not installed in namespace {OPERATOR_NAMESPACE}: hack/install-on-cluster")
    scale = ("scale", "deployment", RELEASE, "-n", OPERATOR_NAMESPACE)
    cluster.kubectl(*scale, "--replicas=0")
    try:
        label = f"app.kubernetes.io/instance={RELEASE}"
        eventually(lambda: not cluster.list("pods", OPERATOR_NAMESPACE, label) or None, START_SECONDS)
        yield
    finally:
        cluster.kubectl(*scale, f"--replicas={found['spec']['replicas']}")
