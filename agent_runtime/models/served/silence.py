"""How long nothing was heard. Pure."""

LONGEST_STEP_SECONDS = 0.2
"""Between two looks more than that does not count: this process itself stood still, and has not read yet what came."""


class Silence:
    """Counts from look to look, and from 0 again whenever it is broken."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def broken(self) -> None:
        """Something was heard."""
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        """Seconds of silence up to now; has to be asked several times a second."""
        if self._looked is not None:
            self._seconds += min(now - self._looked, LONGEST_STEP_SECONDS)
        self._looked = now
        return self._seconds
