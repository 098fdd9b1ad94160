"""Whether a server still makes tokens: `/health` says 200 for one that hangs as well (vllm#36960, gonka#1421). Pure."""

LONGEST_STEP_SECONDS = 0.2
"""Between two looks more than that does not count: this process itself stood still, and has not read yet what came."""


class Silence:
    """Counts from look to look, and from 0 again whenever it is broken."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def broken(self) -> None:
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        """Seconds of silence up to now; has to be asked several times a second."""
        if self._looked is not None:
            self._seconds += min(now - self._looked, LONGEST_STEP_SECONDS)
        self._looked = now
        return self._seconds


STALL_SECONDS = 60.0
"""Twice what the longest prompts take before their first token; far above a step of the slowest models."""


class Pulse:
    """One server's signs of life: tokens on our own streams, and the token counters of its metrics.

    A server that works for others moves its counters and is merely busy. One that is paused makes no tokens either, so it is
    not judged while an update is under way, nor where nobody knows whether one is.
    """

    def __init__(self) -> None:
        self._silence = Silence()
        self._counted: float | None = None

    def beat(self) -> None:
        self._silence.broken()

    def counted(self, tokens: float) -> None:
        """Its metrics were read: tokens that it has processed since its start, for whomever."""
        if tokens != self._counted:
            self._silence.broken()
        self._counted = tokens

    def is_stalled(self, now: float, *, in_flight: int, can_be_judged: bool) -> bool:
        """Whether it hangs, with so many of our calls at it; has to be asked several times a second."""
        quiet = self._silence.seconds(now)
        if not in_flight or not can_be_judged:
            self._silence.broken()
            return False
        return quiet >= STALL_SECONDS
