"""A command whose start and end are waited for, for whoever has no watcher of his own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agent_runtime.executor.host import Child, Exit, FileFailure, Workspace, WorkspaceFailure


class Spawned:
    """A command that has started. Implements `Watcher`; `exited` resolves when it has ended."""

    child: Child

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self._settled: asyncio.Future[None] = loop.create_future()

    async def wait_until_started(self) -> None:
        """Raises FileFailure and WorkspaceFailure."""
        await self._settled

    @property
    def pid(self) -> int:
        """Its number inside the workspace."""
        return self.child.pid

    async def signal(self, number: int, *, tree: bool, cause: str | None = None) -> None:
        """As in `Child`."""
        await self.child.signal(number, tree=tree, cause=cause)

    def started(self) -> None:
        """See Watcher."""
        self._settled.set_result(None)

    def refused(self, failure: FileFailure | WorkspaceFailure) -> None:
        """See Watcher."""
        self._settled.set_exception(failure)

    def ended(self, exit: Exit) -> None:
        """See Watcher."""
        if not self._settled.done():
            self._settled.set_result(None)
        self.exited.set_result(exit)


async def spawn(workspace: Workspace, argv: Sequence[str] | str, **how: Any) -> Spawned:
    """Start a command: `how` as for `Workspace.start`. Raises FileFailure and WorkspaceFailure."""
    spawned = Spawned()
    spawned.child = workspace.start(argv, spawned, **{"env": {}, "cwd": None, "user": None, "tty": None, **how})
    await spawned.wait_until_started()
    return spawned
