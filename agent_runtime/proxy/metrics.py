"""The session proxy's metrics for Prometheus. Clients cannot choose label values."""

from typing import Any, Final

from agent_runtime.proxy.chat import Note, NoteKind
from rollout_api.records import Usage

SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.011, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
"""Buckets of added latency; the proxy's targets are 2 ms at the median and 11 ms at the 99th percentile."""


class _NoMetric:
    """Placeholder for metrics if prometheus-client is not installed."""

    def labels(self, *values: str) -> "_NoMetric":
        return self

    def inc(self, amount: float = 1) -> None:
        pass

    def observe(self, amount: float) -> None:
        pass


class Meter:
    """Counts calls, tokens and latency; counts nothing without the `prometheus_client` module."""

    def __init__(self, prometheus: Any = None) -> None:
        self._prometheus = prometheus
        self._registry = None if prometheus is None else prometheus.CollectorRegistry()
        if prometheus is not None:
            prometheus.ProcessCollector(registry=self._registry)

        def metric(kind: str, name: str, text: str, *labels: str, **settings: Any) -> Any:
            if prometheus is None:
                return _NoMetric()
            return getattr(prometheus, kind)(f"session_proxy_{name}", text, labels, registry=self._registry, **settings)

        self._requests = metric("Counter", "requests", "Replies, by API and status.", "api", "status")
        tokens = metric("Counter", "tokens", "Tokens as the model server counted them.", "kind")
        self.streaming = metric("Gauge", "streams", "Streams in progress.").inc
        """Called with 1 when a stream begins, with -1 when it ends."""
        text = "Time of an answer outside the model, mostly for recording it."
        self._added = metric("Histogram", "added_seconds", text, buckets=SECONDS)
        self.cancelled = metric("Counter", "cancelled", "Model calls whose client disconnected.").inc
        self.coalesced = metric("Counter", "coalesced", "Retries that got their original's answer.").inc
        dropped = metric("Counter", "dropped", "Parts of requests that were dropped with a note.", "kind")
        self._dropped = {kind: dropped.labels(kind) for kind in NoteKind}
        self.forwarded = metric("Counter", "forwarded", "Requests forwarded to the replica that owns the session.").inc
        # Create the series with value 0: a rate ignores the first count of a series that starts at 1.
        self._replies: dict[tuple[str, int], Any] = {}
        self._prompt, self._completion = (tokens.labels(kind) for kind in ("prompt", "completion"))

    def answered(self, added_seconds: float, usage: Usage) -> None:
        """Count a recorded answer of the model; the seconds exclude the model's own time."""
        self._added.observe(added_seconds)
        self._prompt.inc(usage.prompt_tokens)
        self._completion.inc(usage.completion_tokens)

    def noted(self, note: Note) -> None:
        """Count a note."""
        self._dropped[note.kind].inc()

    def replied(self, api: str, status: int) -> None:
        """Count a reply, or the beginning of one."""
        # Cached, because looking up a label costs as much as parsing the request.
        if (counted := self._replies.get((api, status))) is None:
            counted = self._replies[api, status] = self._requests.labels(api, str(status))
        counted.inc()

    def exposition(self) -> bytes | None:
        """Return the text for Prometheus; None if nothing is counted."""
        text: bytes | None = self._prometheus and self._prometheus.generate_latest(self._registry)
        return text


def open_meter() -> Meter:
    """Return a meter that counts if prometheus-client is installed (the `cluster` and `operator` extras)."""
    try:
        import prometheus_client
    except ImportError:
        return Meter()
    return Meter(prometheus_client)
