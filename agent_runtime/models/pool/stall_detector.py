"""Detects servers that produce no tokens: `/health` also returns 200 for a server that hangs (vllm#36960, gonka#1421)."""

LONGEST_STEP_SECONDS = 0.2
"""A longer time between two checks is not counted, because this process was stopped and has not read its input yet."""


class SilenceTimer:
    """Measures the time without tokens between checks."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def broken(self) -> None:
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        """Return the seconds of silence so far; call it several times a second."""
        if self._looked is not None:
            self._seconds += min(now - self._looked, LONGEST_STEP_SECONDS)
        self._looked = now
        return self._seconds


STALL_SECONDS = 60.0
"""Twice the longest time to a first token; far above a step of the slowest models."""


class StallDetector:
    """One server's activity: tokens on our own streams, and the token counters of its metrics.

    A server that works for other clients increases its counters, so it is not stalled. A paused server produces no
    tokens, so nothing is detected during an update, or if the state of an update is unknown.
    """

    def __init__(self) -> None:
        self._silence = SilenceTimer()
        self._counted: float | None = None

    def beat(self) -> None:
        self._silence.broken()

    def counted(self, tokens: float) -> None:
        """Record its metrics: all tokens that it has processed since its start."""
        if tokens != self._counted:
            self._silence.broken()
        self._counted = tokens

    def is_stalled(self, now: float, *, in_flight: int, can_be_judged: bool) -> bool:
        """Whether it hangs, given the number of our calls at it; call it several times a second."""
        quiet = self._silence.seconds(now)
        if not in_flight or not can_be_judged:
            self._silence.broken()
            return False
        return quiet >= STALL_SECONDS
