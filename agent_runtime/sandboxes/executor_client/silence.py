"""Times in which an executor does not answer, because its machine, virtual machine or container stands still."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from agent_runtime.sandboxes.base import SILENT_SECONDS, SandboxFailure

ASK_SECONDS = 5.0
"""Pause between two questions. Work that ends sooner costs none."""


class SilenceWatch:
    """Asks an executor, by `ask`, whether it answers, while something waits for it."""

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._waiting: list[Callable[[bool], None]] = []
        # A timer and not a task that sleeps, because every tool call passes here.
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self, pausing: Callable[[bool], None]) -> Iterator[None]:
        """Call `pausing` with True each time that the executor was silent for `SILENT_SECONDS`, and with False when it
        answers again, until the end of the block.
        """
        self._waiting.append(pausing)
        if self._timer is None and self._asking is None:
            self._set_timer()
        try:
            yield
        finally:
            self._waiting.remove(pausing)
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
        if self._waiting:
            self._asking = asyncio.create_task(self._ask_until_answered())

    async def _ask_until_answered(self) -> None:
        asked_for = list(self._waiting)
        while await self._is_silent():
            for pausing in asked_for:
                if pausing in self._waiting:
                    pausing(True)
            asked_for = list(self._waiting)
        for pausing in self._waiting:
            pausing(False)
        self._asking = None
        self._set_timer()

    async def _is_silent(self) -> bool:
        began = asyncio.get_running_loop().time()
        # A failure that comes at once is no standstill; whatever waits will fail too. Nor is an answer that is not valid.
        with contextlib.suppress(SandboxFailure, TimeoutError, ValueError, KeyError):
            async with asyncio.timeout(SILENT_SECONDS):
                await self._ask()
                return False
        return asyncio.get_running_loop().time() - began >= SILENT_SECONDS
