"""`/metrics` and `/healthz` of a runner pod. The job's spec bounds the values of each label."""

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from functools import partial

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from agent_runtime.engine.events import (
    AttemptFailed,
    Event,
    RolloutSealed,
    StorageRequested,
    ToolEnded,
    TurnEnded,
    WorkspaceAcquired,
)
from agent_runtime.engine.scheduling.completion_rules import LOST
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.runner.report import ShardTally
from rollout_api.listener import limited_listener, page_of
from rollout_api.records import Outcome

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets from the fork of a workspace, some milliseconds, to the slowest start of a sandbox."""
REWARDS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
MOST_REASONS = 32
"""Most distinct reasons of failures, which come from clusters and plugins; further ones are counted as Other."""
OTHER = "Other"
USUAL_REASONS = frozenset(
    (
        *("Timeout", "Unreachable", "RateLimited", "ServerError", "UnexpectedStatus", "BadResponse", "BadRequest"),
        *("Evicted", "Preempted", "NodeLost", "PodDeleted", "SandboxDeleted", "DeadlineExceeded", "OOMKilled"),
    )
)
"""Common reasons of lost attempts: those of the model, which alert RolloutModelErrors watches, and those of nodes and
pods.
"""
SANDBOX_STATES = ("Starting", "Ready")


class RunnerMetrics:
    """The contents of `/metrics`."""

    def __init__(self, tally: ShardTally, tools: Collection[str], restarts: int = 0) -> None:
        self._tools, self._reasons = frozenset(tools), set(USUAL_REASONS)
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rollout_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"rollout_{name}_seconds", text, labels, buckets=SECONDS, registry=registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"rollout_{name}", text, registry=registry).set_function(value)

        self._rollouts = counter("rollouts", "Rollouts that this process sealed.", "outcome")
        self._reward = Histogram("rollout_reward", "Rewards of sealed rollouts.", buckets=REWARDS, registry=registry)
        self._turns = counter("turns", "Model calls that were answered.")
        self._tokens = counter("tokens", "Tokens as the model server counted them.", "kind")
        self._forks = counter("token_forks", "Prompts of sealed rollouts whose ids did not extend those before them.")
        self._model = seconds("model_call", "From a model call to its answer, without failed attempts.")
        self._tool = seconds("tool_call", "From a tool call to its observation.", "tool")
        self._tool_errors = counter("tool_call_errors", "Tool calls that the model got an error for.", "tool")
        self._failed = counter("attempts_failed", "Attempts lost to infrastructure.", "reason")
        self._workspace = seconds("workspace_acquire", "From the request for an attempt's workspace until it is ready.")
        self._sandbox = seconds("sandbox_start", "From the creation of a sandbox until it is ready.")
        self._storage = seconds(
            "storage_request", "Requests to object storage, each attempt counted separately.", "operation"
        )
        self._storage_errors = counter("storage_errors", "Failed requests to object storage.", "operation")
        gauge("rollouts_running", "Rollouts with a running attempt.", lambda: len(tally.running))
        gauge("groups_waiting", "Groups that have not begun yet.", lambda: tally.groups_waiting)
        gauge(
            "infra_failure_fraction",
            "Share of this shard's ended rollouts that were lost to infrastructure.",
            lambda: infra_failure_fraction(tally.outcomes),
        )
        counter("engine_restarts", "Engines that died in this container.").inc(restarts)
        self._sandboxes = Gauge("rollout_sandboxes", "Sandboxes of this runner.", ["state"], registry=registry)
        # Create all series with 0: Prometheus' rate() ignores the first value of a new series.
        for outcome in Outcome:
            self._rollouts.labels(outcome.value)
        for kind in ("prompt", "completion"):
            self._tokens.labels(kind)
        for tool in self._tools:
            self._tool_errors.labels(tool)
        for reason in (*self._reasons, OTHER):
            self._failed.labels(reason)

    def observe(self, event: Event) -> None:
        """Process an event of the engine. Replayed work of an earlier process is not counted again."""
        match event:
            case TurnEnded(replayed=False):
                self._turns.inc()
                self._model.observe(event.model_seconds)
                self._tokens.labels("prompt").inc(event.usage.prompt_tokens)
                self._tokens.labels("completion").inc(event.usage.completion_tokens)
            case ToolEnded():
                tool = event.tool if event.tool in self._tools else OTHER
                self._tool.labels(tool).observe(event.seconds)
                self._tool_errors.labels(tool).inc(event.error)
            case WorkspaceAcquired():
                self._workspace.observe(event.seconds)
            case StorageRequested():
                self._storage.labels(event.operation).observe(event.seconds)
                self._storage_errors.labels(event.operation).inc(event.failed)
            case AttemptFailed():
                self._failed.labels(self._known_reason(event.reason)).inc()
            case RolloutSealed():
                self._rollouts.labels(event.result.outcome.value).inc()
                self._forks.inc(event.result.token_forks)
                if event.result.reward is not None:
                    self._reward.observe(event.result.reward)

    def watch_model(self, model: ServedModel, server: str) -> None:
        """Report the calls to a model; `server` is the name of its ModelServer."""
        self._registry.register(_ModelCollector(model, server))

    def watch_sandboxes(self, states: Callable[[], Mapping[str, int]]) -> None:
        """Report the runner's sandboxes; `states` counts them by state at each scrape."""
        for state in SANDBOX_STATES:
            self._sandboxes.labels(state).set_function(partial(_count, states, state))

    def sandbox_started(self, seconds: float) -> None:
        self._sandbox.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _known_reason(self, reason: str) -> str:
        if len(self._reasons) < MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else OTHER


class _ModelCollector(Collector):
    """Counters of a ServedModel, read at each scrape."""

    def __init__(self, model: ServedModel, server: str) -> None:
        self._model, self._server = model, server

    def collect(self) -> Iterator[Metric]:
        model = self._model
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._family(gauge, "calls_in_flight", "Calls at model servers.", model.in_flight)
        yield self._family(gauge, "calls_waiting", "Calls that wait for the gate or for a place.", model.waiting)
        yield self._family(counter, "spills", "Calls that did not go to their group's first server.", model.spills)
        yield self._family(counter, "resent_calls", "Calls that were sent again.", model.resent)
        yield self._family(counter, "gate_seconds", "Time behind a shut gate.", model.gate_seconds)

    def _family(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, meaning: str, value: float
    ) -> Metric:
        family = kind(f"rollout_model_{name}", meaning, labels=("model_server",))
        family.add_metric((self._server,), value)
        return family


def _count(states: Callable[[], Mapping[str, int]], state: str) -> float:
    return states().get(state, 0)


def infra_failure_fraction(outcomes: Mapping[str, int]) -> float:
    """Return the fraction that the engine compares with `maxInfraFailureFraction`; cancelled rollouts do not count."""
    ended = sum(count for outcome, count in outcomes.items() if outcome != Outcome.CANCELLED)
    return sum(outcomes.get(outcome, 0) for outcome in LOST) / ended if ended else 0.0


@contextlib.asynccontextmanager
async def serve_metrics(exposition: Callable[[], bytes], port: int) -> AsyncIterator[None]:
    """Serve the metrics on all addresses. `/healthz` responds if the event loop, which all rollouts share, works."""
    page = page_of(exposition)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.SockSite(runner, limited_listener(port)).start()
        yield
    finally:
        await runner.cleanup()
