"""What the proxy counts; to be seen only where prometheus-client is installed (the `cluster` and `operator` extras)."""

from typing import Final

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
        from agent_runtime.proxy.prometheus import PrometheusMeter
    except ImportError:
        return Meter()
    return PrometheusMeter()
