"""What a run waits for (failing model calls, a silent model, failing storage, sandboxes, lost attempts), and the error that
ended it. Each process writes it to `health/<shard>.json`, for those that look at the run from elsewhere. Nothing depends on
it.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Final

from agent_runtime.engine.events import AttemptFailed, Event, ModelCallFailing, ModelSilent, StorageRequested
from agent_runtime.extensions import described
from agent_runtime.models.base import RATE_LIMITED
from agent_runtime.recording.health import HEALTH, HealthReport
from agent_runtime.recording.store import StorageError, Store
from agent_runtime.sandboxes.base import SandboxReporter

WRITE_SECONDS: Final = 0.5
REPEAT_SECONDS: Final = 10.0
"""An unchanged report is written again after this time. It shows that the process is alive."""
LAST_WRITE_SECONDS: Final = 2.0
"""A run does not wait longer for the last report of its process."""
RECENT_SECONDS: Final = 60.0
"""Failures of storage are counted over this time."""


class Health:
    """What a run waits for, derived from its events."""

    def __init__(self) -> None:
        self._failing: dict[int, str] = {}
        self._retries, self._rate_limited = 0, 0
        self._silent: dict[str, ModelSilent] = {}
        self._lost = Counter[str]()
        self._storage = deque[float]()
        self._sandboxes: SandboxReporter | None = None
        self._has_ended = False
        self._error: str | None = None

    def watch(self, provider: object) -> None:
        """Report on the sandboxes of this provider, if it reports on them."""
        self._sandboxes = provider if isinstance(provider, SandboxReporter) else None

    def observe(self, event: Event) -> None:
        """Update the state for an event."""
        match event:
            case ModelCallFailing(index=index, message=None):
                self._failing.pop(index, None)
            case ModelCallFailing(index=index, message=str(message)):
                self._retries += 1
                self._rate_limited += message.startswith(RATE_LIMITED)
                self._failing[index] = message
            case ModelSilent(place=place, calls=0):
                self._silent.pop(place, None)
            case ModelSilent(place=place):
                self._silent[place] = event
            case AttemptFailed(reason=reason):
                self._lost[reason] += 1
            case StorageRequested(failed=True):
                self._storage.append(time.monotonic())
            case _:
                pass

    def report(self) -> HealthReport:
        """Return the state now."""
        while self._storage and self._storage[0] < time.monotonic() - RECENT_SECONDS:
            self._storage.popleft()
        silent = max(self._silent.values(), key=lambda event: event.seconds, default=None)
        return HealthReport(
            time=time.time(),
            ended=self._has_ended,
            error=self._error,
            failing_calls=len(self._failing),
            call_retries=self._retries,
            rate_limited_calls=self._rate_limited,
            call_problem=next(reversed(self._failing.values()), None),
            silent_seconds=silent.seconds if silent else 0.0,
            silent_place=silent.place if silent else None,
            storage_failures=len(self._storage),
            sandboxes=dict(self._sandboxes.sandbox_states()) if self._sandboxes else {},
            sandbox_problem=(self._sandboxes.waits_for() or None) if self._sandboxes else None,
            lost_attempts=dict(self._lost),
        )

    @contextlib.asynccontextmanager
    async def written(self, store: Store, shard: int) -> AsyncIterator[None]:
        """Write the reports of a process while the context is open, and once at its end, with the error that ended it."""

        async def write() -> None:
            # Other parts of the run handle an outage of storage. Nothing depends on this report.
            with contextlib.suppress(StorageError):
                await store.put(f"{HEALTH}/{shard}.json", self.report().model_dump_json().encode())

        async def repeat() -> None:
            last, written_at = None, 0.0
            while True:
                state, now = self.report().model_copy(update={"time": 0.0}), time.monotonic()
                if state != last or now >= written_at + REPEAT_SECONDS:
                    last, written_at = state, now
                    await write()
                await asyncio.sleep(WRITE_SECONDS)

        writing = asyncio.create_task(repeat())
        try:
            yield
        except Exception as error:
            self._error = _described(error)
            raise
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            self._has_ended = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_SECONDS):
                    await write()


def _described(error: Exception) -> str:
    """Return an error for users. Messages of our own errors are sentences; other ones need their type."""
    is_own = type(error).__module__.partition(".")[0] in ("agent_runtime", "rollout_api")
    return str(error) if is_own else described(error)
