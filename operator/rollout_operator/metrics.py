"""What Prometheus is told: controller-runtime's names under our prefix, and how sandboxes and rollouts fare.

Labels are kinds, verbs, states and outcomes: never the name of an object.
"""

import time
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_api.model_server import Gate as ModelGate
from rollout_api.records import Outcome
from rollout_operator.actions import Manifest, Ref
from rollout_operator.cache import Cache, uid_of
from rollout_operator.reports import report_of
from rollout_operator.work_queue import WorkQueue

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""From a look at an unchanged object to a pod that waits for a node."""
WRITE_BUCKETS = (0.01, 0.05, 0.2, 1, 5)
"""Few, because there is a series for each kind, verb and code. A write is given up after 5 s."""
SANDBOX_STATES = ("Starting", "Ready", "Finished")
MODEL_SERVER_STATES = ("Ready", "NotReady", "Invalid")
JOB_STATES = ("Progressing", "Succeeded", "Failed", "Suspended", "Invalid")


class Metrics:
    """All instruments of one operator process."""

    def __init__(self, cache: Cache, leading: Callable[[], bool]) -> None:
        self.registry = registry = CollectorRegistry()
        queue = "rollout_workqueue"
        self._adds = Counter(f"{queue}_adds_total", "Keys that were added", ["name"], registry=registry)
        self._retries = Counter(
            f"{queue}_retries_total", "Keys that came back after a failure", ["name"], registry=registry
        )
        self._depth = Gauge(f"{queue}_depth", "Keys that wait to be worked on", ["name"], registry=registry)
        self._waited = Histogram(
            f"{queue}_queue_duration_seconds", "Time a key has waited", ["name"], buckets=SECONDS, registry=registry
        )
        self._worked = Histogram(
            f"{queue}_work_duration_seconds", "Time a key was worked on", ["name"], buckets=SECONDS, registry=registry
        )
        self._unfinished = Gauge(
            f"{queue}_unfinished_work_seconds",
            "Time that work has taken which is not done yet",
            ["name"],
            registry=registry,
        )
        controller = "rollout_controller"
        self._active = Gauge(f"{controller}_active_workers", "Workers that are busy", ["controller"], registry=registry)
        self._reconciles = Counter(
            f"{controller}_reconcile_total", "Looks at an object, by how they ended", ["controller", "result"],
            registry=registry,
        )  # fmt: skip
        self._errors = Counter(
            f"{controller}_reconcile_errors_total", "Looks at an object that failed", ["controller"], registry=registry
        )
        self._times = Histogram(
            f"{controller}_reconcile_time_seconds", "Time of one look at an object", ["controller"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self._writes = Histogram(
            "rollout_api_write_seconds", "Time of one write to the API server", ["kind", "verb", "code"],
            buckets=WRITE_BUCKETS, registry=registry,
        )  # fmt: skip
        self._starts = Histogram(
            "rollout_sandbox_start_seconds", "From a Sandbox's appearance to its being Ready", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        Gauge("rollout_leader", "1 in the replica that works", registry=registry).set_function(lambda: float(leading()))
        registry.register(_Objects(cache, leading))
        self._leading = leading
        self._starting: dict[str, float] = {}

    def watch_queue(self, kind: str, queue: WorkQueue[Ref]) -> None:
        """Report on one kind's queue."""
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
        """One look at an object is over. `result`: success, requeue_after or error."""
        self._reconciles.labels(kind, result).inc()
        self._times.labels(kind).observe(seconds)
        self._worked.labels(kind).observe(seconds)
        if result == "error":
            self._errors.labels(kind).inc()

    def wrote(self, kind: str, verb: str, code: str, seconds: float) -> None:
        """A write was answered, or given up."""
        self._writes.labels(kind, verb, code).observe(seconds)

    def sandbox_seen(self, sandbox: Manifest, is_new: bool, now: float | None = None) -> None:
        """A Sandbox appeared or changed. Its start is timed by this process's clock: the API's times are whole seconds."""
        now = time.monotonic() if now is None else now
        uid, state = uid_of(sandbox), sandbox_state(sandbox)
        if is_new and state == "Starting":
            self._starting[uid] = now
        elif state != "Starting":
            since = self._starting.pop(uid, None)
            if since is not None and state == "Ready" and self._leading():
                self._starts.observe(now - since)

    def sandbox_gone(self, sandbox: Manifest) -> None:
        """A Sandbox was deleted."""
        self._starting.pop(uid_of(sandbox), None)


def sandbox_state(sandbox: Manifest) -> str:
    """One of SANDBOX_STATES."""
    true = _true_conditions(sandbox)
    return "Finished" if "Finished" in true else "Ready" if "Ready" in true else "Starting"


def model_server_state(server: Manifest) -> str:
    """One of MODEL_SERVER_STATES."""
    true = _true_conditions(server)
    return "Invalid" if "Invalid" in true else "Ready" if "Ready" in true else "NotReady"


def job_state(job: Manifest) -> str:
    """One of JOB_STATES: the most final that its conditions say."""
    true = _true_conditions(job)
    for state in ("Failed", "Succeeded", "Invalid", "Suspended"):
        if state in true:
            return state
    return "Progressing"


def _true_conditions(obj: Manifest) -> set[str]:
    conditions = obj.get("status", {}).get("conditions", ())
    return {condition["type"] for condition in conditions if condition["status"] == "True"}


class _Objects(Collector):
    """Counts what is in the cache at the moment of the scrape, so that no figure can drift from the objects.

    Only the leader does, or sums over replicas would count everything twice.
    """

    def __init__(self, cache: Cache, leading: Callable[[], bool]) -> None:
        self._cache = cache
        self._leading = leading

    def collect(self) -> Iterator[Metric]:
        if not self._leading():
            return
        yield _by(
            "rollout_sandboxes", "Sandboxes", "state", SANDBOX_STATES, map(sandbox_state, self._cache.all("Sandbox"))
        )
        yield _by("rollout_jobs", "RolloutJobs", "state", JOB_STATES, map(job_state, self._cache.all("RolloutJob")))
        servers = tuple(self._cache.all("ModelServer"))
        states = map(model_server_state, servers)
        yield _by("rollout_model_servers", "ModelServers", "state", MODEL_SERVER_STATES, states)
        shut = GaugeMetricFamily(
            "rollout_model_gates_shut", "ModelServers whose gate is shut for a policy update", labels=[]
        )
        shut.add_metric([], sum(_policy(server).get("gate") == ModelGate.SHUT for server in servers))
        yield shut
        outcomes = Count[str]()
        reward, rewarded = 0.0, 0
        for report in filter(None, map(report_of, self._cache.all("RolloutShard"))):
            outcomes.update(report.outcomes)
            reward += report.reward_sum
            rewarded += report.rewarded
        sealed = GaugeMetricFamily("rollout_sealed", "Sealed rollouts of the jobs that exist", labels=["outcome"])
        for outcome in Outcome:
            sealed.add_metric([outcome.value], outcomes[outcome.value])
        yield sealed
        mean = GaugeMetricFamily("rollout_mean_reward", "Mean over their rollouts that have a reward", labels=[])
        if rewarded:
            mean.add_metric([], reward / rewarded)
        yield mean


def _policy(server: Manifest) -> Mapping[str, Any]:
    policy: Mapping[str, Any] = (server.get("status") or {}).get("policy") or {}
    return policy


def _by(name: str, text: str, label: str, values: tuple[str, ...], seen: Iterable[str]) -> GaugeMetricFamily:
    counts = Count(seen)
    family = GaugeMetricFamily(name, text, labels=[label])
    for value in values:
        family.add_metric([value], counts[value])
    return family
