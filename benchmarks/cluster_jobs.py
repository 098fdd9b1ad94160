"""Jobs whose agent does nothing: rollouts a minute and API writes, with a pod for each rollout and with shared pods."""

import time
from collections import Counter
from dataclasses import dataclass

from benchmarks.on_cluster import AuditLog, harness_cluster, job_in, new_namespace, of_sandboxes
from benchmarks.report import Row, Target, comparison
from tests.support.cluster import Cluster

ROLLOUTS = 400
GROUP_SIZE = 8
CONCURRENCY = 16  # concurrent rollouts: 16 pods in Plain mode, two in Overlay mode
SEALED_SECONDS = 1800.0


@dataclass(frozen=True)
class Run:
    """One job: its duration, and the API writes while it ran (`AuditLog.writes`)."""

    seconds: float
    writes: Counter[str]

    @property
    def sandboxes(self) -> int:
        return self.writes["create sandboxes"]

    @property
    def sandbox_writes(self) -> int:
        return of_sandboxes(self.writes)


def measure() -> list[Row]:
    """Return writes of a sandbox, of a rollout and of a job; rollouts a minute."""
    cluster = harness_cluster()
    overlay, plain = (_run(cluster, mode) for mode in ("Overlay", "Plain"))
    rows = []
    for mode, run in (("Overlay", overlay), ("Plain", plain)):
        per_sandbox = run.sandbox_writes / run.sandboxes
        what = f"API writes of a sandbox, {mode}, {run.sandboxes} of them"
        rows.append(Row(what, per_sandbox, "writes", target=Target("at most", 4)))
        others = run.writes.total() - run.sandbox_writes
        status = run.writes["patch rolloutjobs/status"] + run.writes["patch rolloutshards/status"]
        rows.append(Row(f"API writes of the job beside them, {mode}", others, "writes", f"{status} of them statuses"))
    per_rollout = overlay.writes.total() / ROLLOUTS
    shared, alone = (ROLLOUTS / run.seconds * 60 for run in (overlay, plain))
    what = f"API writes of a rollout in all, Overlay, {GROUP_SIZE} a sandbox"
    return [
        *rows,
        Row(what, per_rollout, "writes", target=Target("at most", 0.6)),
        comparison(
            f"rollouts a minute, Overlay, {GROUP_SIZE} a sandbox", shared, "/min", "Plain", alone, Target("at least", 5)
        ),
    ]


def _run(cluster: Cluster, mode: str) -> Run:
    task = {"prompt": "Do nothing.", "verifier": {"commands": ["true"]}}
    spec = {
        "groupSize": GROUP_SIZE,
        "sandbox": {"workspaces": {"mode": mode, "perSandbox": GROUP_SIZE}},
        "verifier": {"mode": "Shared"},
        "runners": {"concurrency": CONCURRENCY},
        "tasks": {"inline": [{"name": f"task-{number:03}", **task} for number in range(ROLLOUTS // GROUP_SIZE)]},
    }
    with new_namespace(cluster) as namespace:
        audit = AuditLog(cluster)
        started = time.monotonic()
        job = job_in(cluster, namespace, f"noop-{mode.lower()}", spec)
        job.wait("Succeeded", SEALED_SECONDS)
        seconds = time.monotonic() - started
        outcomes = job.status["outcomes"]
        if outcomes != {"Completed": ROLLOUTS}:
            raise RuntimeError(f"the {mode} job should have completed {ROLLOUTS} rollouts: {outcomes}")
        return Run(seconds, audit.writes(namespace))
