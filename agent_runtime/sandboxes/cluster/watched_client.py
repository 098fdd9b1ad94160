"""An executor whose Sandbox is watched: its calls end when the Sandbox does, not when a connection times out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from agent_runtime.sandboxes.base import CommandResult, SandboxFailure
from agent_runtime.sandboxes.cluster.sandbox_view import Reason
from agent_runtime.sandboxes.command_frames import Running
from agent_runtime.sandboxes.executor_client import ExecutorClient, Query, Reply

T = TypeVar("T")


class WatchedClient(ExecutorClient):
    """After `end`, all calls, those under way too, raise SandboxFailure with its reason: the address of a dead pod swallows
    packets. `find_out` makes of a lost connection the failure that is to be told.
    """

    def __init__(
        self, address: str, token: str, find_out: Callable[[SandboxFailure], Awaitable[SandboxFailure]]
    ) -> None:
        super().__init__(address, token)
        self._find_out = find_out
        self._ended: Reason | None = None
        self._under_way: set[asyncio.Timeout] = set()

    def end(self, reason: Reason) -> None:
        """The sandbox is gone."""
        if self._ended is None:
            self._ended = reason
            for scope in self._under_way:
                scope.reschedule(0)

    async def call(self, method: str, path: str, **arguments: Any) -> Reply:
        """See ExecutorClient."""
        call = super().call
        return await self._unless_ended(lambda: call(method, path, **arguments))

    async def _command(self, *arguments: Any) -> CommandResult | Running:
        command = super()._command
        return await self._unless_ended(lambda: command(*arguments))

    async def stream(self, path: str, query: Query = ()) -> AsyncIterator[bytes]:
        """See ExecutorClient."""
        chunks = super().stream(path, query)
        while (chunk := await self._unless_ended(lambda: anext(chunks, None))) is not None:
            yield chunk

    async def _unless_ended(self, start: Callable[[], Awaitable[T]]) -> T:
        if self._ended is None:
            try:
                async with asyncio.timeout(None) as scope:
                    self._under_way.add(scope)
                    try:
                        return await start()
                    finally:
                        self._under_way.discard(scope)
            except TimeoutError:
                if self._ended is None:
                    raise
            except SandboxFailure as failure:
                if self._ended is None:
                    if failure.reason != "SandboxLost":
                        raise
                    raise self.judged(await self._find_out(failure)) from failure
        raise self.judged(SandboxFailure(self._ended.word, self._ended.message))
