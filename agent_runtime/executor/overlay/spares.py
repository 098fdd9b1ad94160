"""When workspaces are made, and when the processes that they are made from."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

from agent_runtime.executor.host import WorkspaceFailure
from agent_runtime.executor.init.channel import Message

# As many as a group's members are, who come at once. Each is a process that waits, and holds memory.
_MOST = 8
# While workspaces are being asked for, making spares would only keep the processors from those.
_CALM_SECONDS = 0.1


class Spares:
    """The processes that wait in the zygote's care to become a workspace.

    `ask` asks the zygote; `free_places` says for how many workspaces there is room.
    """

    def __init__(self, ask: Callable[[Message], Awaitable[Message]], free_places: Callable[[], int]) -> None:
        self._ask = ask
        self._free_places = free_places
        # It takes a processor to make one: more at once would all be ready as late as the last, where these come one by one.
        self._making = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._restocking: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn to have one workspace made; that takes a spare, if there is one."""
        self.disturb()
        try:
            async with self._making:
                yield
        finally:
            self.restock()

    def restock(self) -> None:
        """Soon have spares made for the places that are free then."""
        self.disturb()
        self._restocking = asyncio.create_task(self._restock())

    def disturb(self) -> None:
        """Make no more spares for now."""
        if self._restocking is not None:
            self._restocking.cancel()

    async def _restock(self) -> None:
        """Once it is calm, have the zygote make spares for the places that are free, one after the other."""
        await asyncio.sleep(_CALM_SECONDS)
        wanted = max(1, min(self._free_places(), _MOST))
        with contextlib.suppress(WorkspaceFailure):
            while int((await self._ask({"do": "spare", "wanted": wanted}))["waiting"]) < wanted:
                pass
