"""The proxy's metrics for Prometheus. No label has values that a client chooses."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from agent_runtime.proxy.metrics import SECONDS, Meter
from rollout_api.records import Usage


class PrometheusMeter(Meter):
    """What `/metrics` shows; see `Meter`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"session_proxy_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "Replies, by API and status.", "api", "status")
        self._tokens = counter("tokens", "Tokens as the model server counted them.", "kind")
        self._cancelled = counter("cancelled", "Model calls whose client went away.")
        self._coalesced = counter("coalesced", "Retries that got their original's answer.")
        self._forwarded = counter("forwarded", "Requests sent on to the replica that owns the session.")
        self._streams = Gauge("session_proxy_streams", "Streams under way.", registry=registry)
        self._added = Histogram(
            "session_proxy_added_seconds",
            "Time of an answer that was not the model's: recording it, above all.",
            buckets=SECONDS,
            registry=registry,
        )
        # A rate over a series needs its 0: one that appears with its first count loses it.
        self._replies: dict[tuple[str, int], Counter] = {}
        self._prompt, self._completion = (self._tokens.labels(kind) for kind in ("prompt", "completion"))

    def answered(self, added_seconds: float, usage: Usage) -> None:
        """See `Meter.answered`."""
        self._added.observe(added_seconds)
        self._prompt.inc(usage.prompt_tokens)
        self._completion.inc(usage.completion_tokens)

    def replied(self, api: str, status: int) -> None:
        """See `Meter.replied`."""
        # Looking a label up costs as much as parsing the request.
        if (counted := self._replies.get((api, status))) is None:
            counted = self._replies[api, status] = self._requests.labels(api, str(status))
        counted.inc()

    def streaming(self, change: int) -> None:
        """See `Meter.streaming`."""
        self._streams.inc(change)

    def cancelled(self) -> None:
        """See `Meter.cancelled`."""
        self._cancelled.inc()

    def coalesced(self) -> None:
        """See `Meter.coalesced`."""
        self._coalesced.inc()

    def forwarded(self) -> None:
        """See `Meter.forwarded`."""
        self._forwarded.inc()

    def exposition(self) -> bytes:
        """See `Meter.exposition`."""
        return generate_latest(self._registry)
