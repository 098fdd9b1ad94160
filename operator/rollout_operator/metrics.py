"""The operator's Prometheus metrics: those of controller-runtime with the prefix `rollout_`, and counts of objects.

Labels are kinds, verbs, states and outcomes, never names of objects.
"""

import time
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_api.conditions import true_conditions
from rollout_api.model_server import Gate as ModelGate
from rollout_api.on_cluster.objects import Manifest
from rollout_api.records import Outcome
from rollout_operator.actions import Ref
from rollout_operator.cache import Cache, report_of, uid_of
from rollout_operator.work_queue import WorkQueue

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Buckets for durations from 1 ms (planning an unchanged object) to 500 s (a pod that waits for a node)."""
WRITE_BUCKETS = (0.01, 0.05, 0.2, 1, 5)
"""Few buckets, because each kind, verb and code has its own series. A write times out after 5 s."""
SANDBOX_STATES = ("Finished", "Ready", "Parked", "Starting")
MODEL_SERVER_STATES = ("Invalid", "Ready", "NotReady")
JOB_STATES = ("Failed", "Succeeded", "Invalid", "Suspended", "Progressing")
"""States of a job, the most final one first."""


class Metrics:
    """All metrics of one operator process."""

    def __init__(self, cache: Cache, leading: Callable[[], bool]) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"{name}_seconds", text, labels, buckets=buckets, registry=registry)

        queue, controller = "rollout_workqueue", "rollout_controller"
        self._adds = counter(f"{queue}_adds_total", "Keys that were added", "name")
        self._retries = counter(f"{queue}_retries_total", "Keys that were queued again after a failure", "name")
        self._depth = gauge(f"{queue}_depth", "Keys that wait for a worker", "name")
        self._waited = seconds(f"{queue}_queue_duration", "Time that a key was queued", "name")
        self._worked = seconds(f"{queue}_work_duration", "Processing time of a key", "name")
        unfinished = "Time of unfinished work"
        self._unfinished = gauge(f"{queue}_unfinished_work_seconds", unfinished, "name")
        self._active = gauge(f"{controller}_active_workers", "Workers that are busy", "controller")
        rounds = "Reconciliations of an object, by result"
        self._reconciles = counter(f"{controller}_reconcile_total", rounds, "controller", "result")
        self._errors = counter(f"{controller}_reconcile_errors_total", "Failed reconciliations", "controller")
        self._times = seconds(f"{controller}_reconcile_time", "Duration of one reconciliation", "controller")
        writes = "Time of one write to the API server"
        self._writes = seconds("rollout_api_write", writes, "kind", "verb", "code", buckets=WRITE_BUCKETS)
        self._starts = seconds("rollout_sandbox_start", "From a Sandbox's creation until it is Ready")
        Gauge("rollout_leader", "1 in the leading replica", registry=registry).set_function(lambda: float(leading()))
        registry.register(_Objects(cache, leading))
        self._leading = leading
        self._starting: dict[str, float] = {}

    def watch_queue(self, kind: str, queue: WorkQueue[Ref]) -> None:
        queue.on_add = self._adds.labels(kind).inc
        queue.on_retry = self._retries.labels(kind).inc
        queue.on_take = self._waited.labels(kind).observe
        self._depth.labels(kind).set_function(queue.depth)
        self._unfinished.labels(kind).set_function(lambda: sum(queue.unfinished()))
        self._active.labels(kind).set_function(lambda: len(queue.unfinished()))
        for result in ("success", "requeue_after", "error"):
            self._reconciles.labels(kind, result)
        self._errors.labels(kind)

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """Record one reconciliation. `result` is success, requeue_after or error."""
        self._reconciles.labels(kind, result).inc()
        self._times.labels(kind).observe(seconds)
        self._worked.labels(kind).observe(seconds)
        if result == "error":
            self._errors.labels(kind).inc()

    def wrote(self, kind: str, verb: str, code: str, seconds: float) -> None:
        """Record a write that got a response or timed out."""
        self._writes.labels(kind, verb, code).observe(seconds)

    def sandbox_seen(self, sandbox: Manifest, is_new: bool, now: float | None = None) -> None:
        """Record a new or changed Sandbox. Its start is timed by this process's clock, because API times are whole
        seconds.
        """
        now = time.monotonic() if now is None else now
        uid, state = uid_of(sandbox), state_of(sandbox, SANDBOX_STATES)
        if is_new and state == "Starting":
            self._starting[uid] = now
        elif state != "Starting":
            since = self._starting.pop(uid, None)
            if since is not None and state == "Ready" and self._leading():
                self._starts.observe(now - since)

    def sandbox_gone(self, sandbox: Manifest) -> None:
        self._starting.pop(uid_of(sandbox), None)


def state_of(obj: Manifest, states: tuple[str, ...]) -> str:
    """Return the first of these states whose condition is True; the last state if none is."""
    true = true_conditions(obj.get("status") or {})
    return next((state for state in states if state in true), states[-1])


class _Objects(Collector):
    """Counts cached objects at the time of the scrape, so that figures always match the objects.

    Only the leader reports them; otherwise sums over replicas would count each object several times.
    """

    def __init__(self, cache: Cache, leading: Callable[[], bool]) -> None:
        self._cache = cache
        self._leading = leading

    def collect(self) -> Iterator[Metric]:
        if not self._leading():
            return
        servers = tuple(self._cache.all("ModelServer"))
        for name, text, states, objects in (
            ("rollout_sandboxes", "Sandboxes", SANDBOX_STATES, self._cache.all("Sandbox")),
            ("rollout_jobs", "RolloutJobs", JOB_STATES, self._cache.all("RolloutJob")),
            ("rollout_model_servers", "ModelServers", MODEL_SERVER_STATES, servers),
        ):
            counts = Count(state_of(obj, states) for obj in objects)
            yield _family(name, text, {state: counts[state] for state in states}, "state")
        pools = [(pool.get("status") or {}).get("places") or {} for pool in self._cache.all("SandboxPool")]
        places = {state: sum(pool.get(state, 0) for pool in pools) for state in ("total", "used", "wanted")}
        yield _family("rollout_pool_places", "Places for workspaces in SandboxPools", places, "state")
        shut = sum(_policy(server).get("gate") == ModelGate.SHUT for server in servers)
        yield _family("rollout_model_gates_shut", "ModelServers whose gate is shut for a policy update", {"": shut})
        reports = [report for report in map(report_of, self._cache.all("RolloutShard")) if report is not None]
        sealed = {outcome.value: sum(report.outcomes.get(outcome, 0) for report in reports) for outcome in Outcome}
        yield _family("rollout_sealed", "Sealed rollouts of existing jobs", sealed, "outcome")
        rewarded = sum(report.rewarded for report in reports)
        mean = {"": sum(report.reward_sum for report in reports) / rewarded} if rewarded else {}
        yield _family("rollout_mean_reward", "Mean reward over the rollouts of existing jobs", mean)


def _policy(server: Manifest) -> Mapping[str, Any]:
    policy: Mapping[str, Any] = (server.get("status") or {}).get("policy") or {}
    return policy


def _family(name: str, text: str, values: Mapping[str, float], *labels: str) -> GaugeMetricFamily:
    """Return a gauge with one value for each label value, or without labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family
