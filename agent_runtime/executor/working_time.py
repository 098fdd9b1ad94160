"""A clock that leaves out times when this process was stopped, for deadlines of commands and agents. The engine imports
it too.
"""

from __future__ import annotations

import asyncio

TICK_SECONDS = 5.0
"""Callers must read a `WorkingTime` at least this often while they measure."""


class WorkingTime:
    """The event loop's time, without periods in which this process was stopped (SIGSTOP, Ctrl-Z) or frozen with its
    container. It detects them by two readings more than twice `TICK_SECONDS` apart.
    """

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._read_at = self._time()
        self._stood_still = 0.0

    def __call__(self) -> float:
        now = self._time()
        if now - self._read_at > 2 * TICK_SECONDS:
            self._stood_still += now - self._read_at
        self._read_at = now
        return now - self._stood_still
