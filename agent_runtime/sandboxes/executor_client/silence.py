"""Times in which an executor does not answer, because its machine, virtual machine or container stands still."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from agent_runtime.sandboxes.base import SILENT_SECONDS, SandboxFailure

ASK_SECONDS = 5.0
"""Pause between two questions. Work that ends sooner costs none."""
MAX_SILENT_SECONDS = 3600.0
"""Limit of the silence that one call of `watched` reports, because the policy may control what answers."""


class SilenceWatch:
    """Asks an executor, by `ask`, whether it answers, while something waits for it."""

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._left: dict[Callable[[bool], None], float] = {}
        """By `pausing`, the seconds of silence that are still reported."""
        # A timer and not a task that sleeps, because every tool call passes here.
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self, pausing: Callable[[bool], None]) -> Iterator[None]:
        """Call `pausing` with True when the executor is silent, and with False when it answers again, until the end of the
        block.
        """
        self._left[pausing] = MAX_SILENT_SECONDS
        if self._timer is None and self._asking is None:
            self._set_timer()
        try:
            yield
        finally:
            del self._left[pausing]
            pausing(False)

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(ASK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._left:
            self._asking = asyncio.create_task(self._ask_until_answered())

    async def _ask_until_answered(self) -> None:
        waiting = list(self._left)
        while await self._is_silent():
            for pausing in waiting:
                if pausing in self._left:
                    self._left[pausing] -= SILENT_SECONDS
                    pausing(self._left[pausing] >= 0)
        for pausing in self._left:
            pausing(False)
        self._asking = None
        self._set_timer()

    async def _is_silent(self) -> bool:
        began = asyncio.get_running_loop().time()
        # A failure that comes at once is no standstill; whatever waits will fail too.
        with contextlib.suppress(SandboxFailure, TimeoutError):
            async with asyncio.timeout(SILENT_SECONDS):
                await self._ask()
                return False
        return asyncio.get_running_loop().time() - began >= SILENT_SECONDS
