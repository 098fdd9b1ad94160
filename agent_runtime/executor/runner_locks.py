"""Whether the processes that use this executor on their own machine still live, by the locks that they hold."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Final

LOOK_SECONDS: Final = 5.0
ABANDONED_SECONDS: Final = 60.0
"""The next process of the run finds the executor, if it begins within this time after the last one died."""


class RunnerLocks:
    """The lock files `shard-*.lock` of a run in a folder. The kernel frees the lock of a process that dies."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._free_since: float | None = None

    def is_abandoned(self, now: float) -> bool:
        """Whether at each look for ABANDONED_SECONDS there were locks, and nothing held one."""
        if not self._are_free():
            self._free_since = None
            return False
        if self._free_since is None:
            self._free_since = now
        return now - self._free_since >= ABANDONED_SECONDS

    def _are_free(self) -> bool:
        found = False
        # A process that stops regularly removes its file, and says how long the executor stays.
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("shard-") and entry.name.endswith(".lock"):
                    with suppress(FileNotFoundError), open(entry.path) as file:
                        try:
                            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        except BlockingIOError:
                            return False
                        found = True
        return found
