"""Whether anybody needs this executor: one that nobody asks for anything ends itself."""

from __future__ import annotations

import time


class Activity:
    """Counts what is being done for somebody who has shown the token."""

    def __init__(self) -> None:
        self.at_work = 0
        self.last = time.monotonic()

    def begin(self) -> None:
        """A request, or a command that somebody waits for, begins."""
        self.at_work += 1

    def end(self) -> None:
        """It has been answered, or nobody waits for it any more."""
        self.at_work -= 1
        self.last = time.monotonic()
