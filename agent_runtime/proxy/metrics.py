"""What the proxy counts; to be seen only where prometheus-client is installed (the `cluster` and `operator` extras).

The proxy's metrics for Prometheus. No label has values that a client chooses.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from rollout_api.records import Usage

SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.011, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
"""Of added latency; 2 and 11 ms are what the proxy promises at the median and at the 99th percentile."""


class Meter:
    """Counts nothing."""

    def answered(self, added_seconds: float, usage: Usage) -> None:
        """A model's answer was recorded; the seconds are those that were not the model's."""

    def replied(self, api: str, status: int) -> None:
        """A request has its reply, or the beginning of one."""

    def streaming(self, change: int) -> None:
        """A stream begins (1) or ends (-1)."""

    def cancelled(self) -> None:
        """A client went away, and the model's work was stopped."""

    def coalesced(self) -> None:
        """A retry got its original's answer."""

    def forwarded(self) -> None:
        """A request went to the replica that owns its session."""

    def exposition(self) -> bytes | None:
        """The text that Prometheus reads; None where nothing is counted."""
        return None


def open_meter() -> Meter:
    """A meter that counts, where it can."""
    try:
        from agent_runtime.proxy.metrics import PrometheusMeter
    except ImportError:
        return Meter()
    return PrometheusMeter()


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
