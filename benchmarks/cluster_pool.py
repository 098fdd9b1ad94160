"""Rollouts that do nothing, in many environments, as a RolloutJob and in agent-sandbox's warm pools on the same cluster.

`python -m benchmarks.cluster_pool --environments 5 --members 12 --at-once 10` measures a small form in minutes.
"""

import argparse
import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.conversation import Subject
from benchmarks.on_cluster import api_writes, harness_cluster, job_in, new_namespace
from benchmarks.report import Row, Target, comparison, percentile_rows, print_table
from benchmarks.subjects.agent_sandbox import pool_size
from hack.cluster.harness.recipes import AGENT_SANDBOX
from tests.support.cluster import QUICKSTART_IMAGE, Cluster

PEER = f"agent-sandbox {AGENT_SANDBOX.version}"
SEALED_SECONDS = 1800.0
FILL_SECONDS = 240
# Workspaces of one sandbox of our pool at once.
POOL_PLACES = 32
# What the cluster still writes about pods that have ended, such as their deletions, belongs to their rollouts.
SETTLE_SECONDS, SETTLE_POLL_SECONDS = 60.0, 2.0


@dataclass(frozen=True)
class Load:
    """How many rollouts are run, and how many of them at once."""

    environments: int
    members: int
    """Rollouts of each environment."""
    at_once: int

    @property
    def rollouts(self) -> int:
        return self.environments * self.members

    def __str__(self) -> str:
        return f"{self.rollouts:,} rollouts, {self.environments} environments × {self.members}, {self.at_once} at once"


@dataclass(frozen=True)
class Run:
    """What one way of running a load took."""

    load: Load
    seconds: float
    claims: list[float]
    """Seconds of each request for a workspace or sandbox, until it was ready."""
    writes: Counter[str]
    """Writes to the API server by anyone (`api_writes`), from the start of the clock until its pods are gone."""
    failed: int
    why: str = ""
    prepared: int = 0
    """Pods that ran when the clock started."""
    cold: int = 0
    """Claims for which no prepared pod was left."""

    @property
    def rate(self) -> float:
        """Rollouts a second; failed ones do not count."""
        return (self.load.rollouts - self.failed) / self.seconds


FULL = Load(environments=50, members=40, at_once=100)
# With a pod for each rollout, the peer completes about one a second on two cores, so it runs a part of the load.
PEER_MEMBERS = 8


def measure(load: Load = FULL, peer_members: int = PEER_MEMBERS) -> list[Row]:
    """Return seconds, claims, API writes and failures of both, and the ratio of their rollouts a second."""
    cluster = harness_cluster()
    ours = _said("ours", run_ours(cluster, load))
    part = replace(load, members=min(peer_members, load.members))
    with _agent_sandbox(cluster):
        fresh = _said("claims", run_peer(cluster, part, "claims"))
        # The whole load, because its claims are as many for a part.
        recycled = _said("recycled", run_peer(cluster, load, "recycled"))
    only = "" if part == load else f", measured with {part.rollouts:,} of {load.rollouts:,} rollouts"
    return [
        *_rows("ours", ours, Target("at most", 120) if load == FULL else None),
        *_rows(f"{PEER}, claims", fresh),
        *_rows(f"{PEER}, recycled", recycled),
        comparison("rollouts a second", ours.rate, "/s", f"{PEER}, claims{only}:", fresh.rate, Target("at least", 5)),
        comparison("the same", ours.rate, "/s", f"{PEER}, recycled:", recycled.rate),
        comparison(
            "API writes of a rollout",
            ours.writes.total() / ours.load.rollouts,
            "writes",
            f"{PEER}, claims{only}:",
            fresh.writes.total() / fresh.load.rollouts,
        ),
    ]


def _said(who: str, run: Run) -> Run:
    """Print a finished run, because the next one may take many minutes."""
    print(f"{who}: {run.load}: {run.seconds:.1f} s, {run.failed} failed {run.why}", file=sys.stderr)
    return run


def _rows(who: str, run: Run, target: Target | None = None) -> list[Row]:
    prepared = f"pods before the clock started: {run.prepared}; claims without one: {run.cold}" if run.prepared else ""
    rows = [Row(f"{who}: {run.load}", run.seconds, "s", prepared, target=target)]
    if run.claims:  # otherwise all have failed
        rows += percentile_rows(f"{who}: claim", run.claims)
    most = ", ".join(f"{what} {count / run.load.rollouts:.2g}" for what, count in run.writes.most_common(5))
    return [
        *rows,
        Row(f"{who}: API writes of a rollout", run.writes.total() / run.load.rollouts, "writes", most),
        Row(f"{who}: failed", run.failed, "rollouts", run.why, target=Target("at most", 0)),
    ]


def run_ours(cluster: Cluster, load: Load) -> Run:
    """Run the load as one RolloutJob in a SandboxPool: a task for each environment. The clock starts before the job exists,
    and ends when its results are written.
    """
    tasks = [
        {
            "name": f"environment-{number:03}",
            "prompt": "Do nothing.",
            "files": [{"path": "environment/name", "content": f"environment-{number:03}\n"}],
            "verifier": {"commands": ["true"]},
        }
        for number in range(load.environments)
    ]
    spec = {
        "groupSize": load.members,
        "sandbox": {"pool": "warm", "workspaces": {"mode": "Overlay"}},
        "verifier": {"mode": "Shared"},
        "runners": {"concurrency": load.at_once},
        "tasks": {"inline": tasks},
    }
    with new_namespace(cluster) as namespace:
        pods = math.ceil(load.at_once / POOL_PLACES)
        _fill(cluster, namespace, pods)
        before = api_writes(cluster)
        started = time.monotonic()
        job = job_in(cluster, namespace, "noop", spec)
        job.wait("Succeeded", SEALED_SECONDS)
        seconds = time.monotonic() - started
        outcomes = job.status["outcomes"]
        failed = load.rollouts - outcomes.get("Completed", 0)
        claims = [result["seconds"]["boot"] for result in job.results()]
        _settle(cluster, namespace, pods)
        writes = api_writes(cluster) - before
        return Run(load, seconds, claims, writes, failed, str(outcomes) if failed else "", prepared=pods)


def _fill(cluster: Cluster, namespace: str, pods: int) -> None:
    """Create the pool, and wait until its sandboxes are ready."""
    pool = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": "warm", "namespace": namespace},
        "spec": {"replicas": pods, "sandbox": {"image": QUICKSTART_IMAGE, "perSandbox": POOL_PLACES}},
    }
    cluster.apply(pool)
    cluster.kubectl("wait", "sandboxpool/warm", "-n", namespace, "--for=condition=Ready", f"--timeout={FILL_SECONDS}s")


def run_peer(cluster: Cluster, load: Load, call: str) -> Run:
    """Run the load in agent-sandbox's pools. The clock starts when the pools are full, and ends with the last deletion of a
    claim, without waiting for the pods.
    """
    size = pool_size(load.members, load.environments, load.at_once)
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    with new_namespace(cluster) as namespace, Subject("benchmarks.subjects.agent_sandbox") as peer:
        question = {"namespace": namespace, "environments": load.environments}
        peer.ask(call="fill", size=size, image=QUICKSTART_IMAGE, **question)
        before = api_writes(cluster)
        found = peer.ask(call=call, members=load.members, at_once=load.at_once, **question)
        # Pools are filled again, those of recycled sandboxes are not.
        _settle(cluster, namespace, 0 if call == "recycled" else size * load.environments)
        return Run(
            load,
            found["seconds"],
            found["claims"],
            api_writes(cluster) - before,
            found["failed"],
            found["why"],
            prepared=size * load.environments,
            cold=found["cold"],
        )


def _settle(cluster: Cluster, namespace: str, pods: int) -> None:
    """Wait until only so many pods of a namespace have not ended, or SETTLE_SECONDS."""

    def living() -> int:
        return sum(pod["status"]["phase"] in ("Pending", "Running") for pod in cluster.list("pods", namespace))

    until = time.monotonic() + SETTLE_SECONDS
    while living() > pods and time.monotonic() < until:
        time.sleep(SETTLE_POLL_SECONDS)


@contextlib.contextmanager
def _agent_sandbox(cluster: Cluster) -> Iterator[None]:
    cluster.node_process("addon", "start", "agent-sandbox")
    try:
        yield
    finally:
        cluster.node_process("addon", "stop", "agent-sandbox")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_pool", description=__doc__)
    parser.add_argument("--environments", type=int, default=FULL.environments)
    parser.add_argument("--members", type=int, default=FULL.members, help="rollouts of each environment")
    parser.add_argument("--at-once", type=int, default=FULL.at_once)
    parser.add_argument("--peer-members", type=int, default=PEER_MEMBERS, help="the same for agent-sandbox")
    options = parser.parse_args()
    load = Load(options.environments, options.members, options.at_once)
    print_table({"cluster_pool": measure(load, options.peer_members)}, Console(width=150))


if __name__ == "__main__":
    main()
