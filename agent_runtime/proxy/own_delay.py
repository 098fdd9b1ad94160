"""How long this process kept a call waiting: it stood still, or its storage did not answer.

A client may give up such a call, and its program may fail because of that. Only delays that no request can cause count:
time in which the process was stopped, without time in which it used or waited for a CPU; and time in which storage did
not answer a small read. A large request makes its own write slow, but not that read.
"""

import asyncio
import contextlib
import math
import time
import weakref
from collections.abc import Iterator
from typing import Final, Protocol, runtime_checkable

from agent_runtime.models.base import PROCESS_STOPPED, STORAGE_SILENT, ModelError
from agent_runtime.recording.store import StorageError
from agent_runtime.shared_tasks import started

OWN_SECONDS: Final = 5.0
"""A call that was delayed for this long was not given up by the client's fault. The executor counts a request without a
runner as missed after the same time (`ABSENT_SECONDS`), so a stopped runner and a dead one have the same effect.
"""
_BEAT_SECONDS: Final = 1.0
_RECENT_SECONDS: Final = 2.0
"""A call that begins so soon after a standstill may have been sent during it."""


@runtime_checkable
class TestableStorage(Protocol):
    """A journal whose storage can be tested."""

    async def test_storage(self) -> None:
        """Return when storage has answered a small read. Raises StorageError."""


class Standstills:
    """Measures how long this process stood still (SIGSTOP, Ctrl-Z, a frozen container), while any session refers to it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_at, self._busy_seconds = self._loop.time(), _busy_seconds()
        self._seconds = 0.0
        self._latest = -math.inf, 0.0
        """End and duration of the latest standstill."""
        _beat(weakref.ref(self))

    @classmethod
    def of_loop(cls) -> "Standstills":
        """Return the one of the running event loop, which all sessions share."""
        loop = asyncio.get_running_loop()
        if (found := _OF_LOOPS.get(loop)) is None:
            found = _OF_LOOPS[loop] = cls()
        return found

    def seconds(self) -> float:
        """Return how long it stood still so far. A policy can make process and machine busy, so that does not count."""
        now, busy_seconds = self._loop.time(), _busy_seconds()
        still = now - self._read_at - (busy_seconds - self._busy_seconds)
        self._read_at, self._busy_seconds = now, busy_seconds
        if still >= OWN_SECONDS:
            self._seconds += still
            self._latest = now, still
        return self._seconds

    def seconds_before_call(self) -> float:
        """Return the same for a call that begins now, without a standstill that has just ended."""
        seconds, (ended, still) = self.seconds(), self._latest
        return seconds - still if self._loop.time() - ended < _RECENT_SECONDS else seconds


_OF_LOOPS: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Standstills] = weakref.WeakValueDictionary()


def _busy_seconds() -> float:
    """Return for how long this process has used CPUs, and this thread has waited for one."""
    waited = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as counters:
        waited = int(counters.read().split()[1]) / 1e9
    return time.process_time() + waited


def _beat(standstills: weakref.ref[Standstills]) -> None:
    if (found := standstills()) is not None:
        found.seconds()
        asyncio.get_running_loop().call_later(_BEAT_SECONDS, _beat, standstills)


class OwnDelay:
    """The delay of one call, from its begin."""

    def __init__(self, standstills: Standstills, journal: object) -> None:
        self._standstills, self._stood_before = standstills, standstills.seconds_before_call()
        self._storage = journal if isinstance(journal, TestableStorage) else None
        self._loop = asyncio.get_running_loop()
        self._silent = 0.0
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Test storage repeatedly during a write that takes longer than a second. A call has one write at a time."""
        timer = self._loop.call_later(_BEAT_SECONDS, self._ask)
        try:
            yield
        finally:
            timer.cancel()
            self._answered()
            if self._asking is not None:
                self._asking.cancel()
                self._asking = None

    def failure(self) -> ModelError | None:
        """Return why a client that gives the call up now is not the cause; None if it is."""
        stood = self._standstills.seconds() - self._stood_before
        if stood >= OWN_SECONDS:
            return ModelError(PROCESS_STOPPED, f"the process that answers stood still for {stood:.0f} s during a call")
        silent = self._silent + (0.0 if self._asked_at is None else self._loop.time() - self._asked_at)
        if silent >= OWN_SECONDS:
            return ModelError(STORAGE_SILENT, f"storage did not answer for {silent:.0f} s during a call")
        return None

    def _ask(self) -> None:
        if self._storage is not None:
            self._asking = started(self._ask_repeatedly(self._storage))

    async def _ask_repeatedly(self, storage: TestableStorage) -> None:
        while True:
            self._asked_at = self._loop.time()
            # The write fails too, and its error decides.
            with contextlib.suppress(StorageError):
                await storage.test_storage()
            self._answered()
            await asyncio.sleep(_BEAT_SECONDS)

    def _answered(self) -> None:
        if self._asked_at is not None:
            self._silent += self._loop.time() - self._asked_at
            self._asked_at = None
