"""One list and watch of a runner's Sandboxes, and a client whose calls end with its Sandbox."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from agent_runtime.kube.api import ApiError, KubeApi, retry_pause
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure
from agent_runtime.sandboxes.cluster.sandbox_object import Reason, SandboxView, sandbox_view
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Query, Reply
from agent_runtime.sandboxes.executor_client.commands import Running

log = logging.getLogger(__name__)

Changed = Callable[[str, SandboxView | None], None]
"""Called for every change, by name; None if the Sandbox was deleted."""


class SandboxViews:
    """Known state of the Sandboxes. A list replaces it, events change it; `changed` is called for each difference."""

    def __init__(self, changed: Changed) -> None:
        self.views: dict[str, SandboxView] = {}
        self.resource_version = ""
        """Where a watch continues."""
        self._changed = changed

    def set(self, sandboxes: Iterable[Mapping[str, Any]], resource_version: str) -> None:
        """Replace the state by a list: missing entries were deleted without an event."""
        there = {view.name: view for view in map(sandbox_view, sandboxes)}
        for name in self.views.keys() - there.keys():
            self._forget(name)
        for view in there.values():
            self._learn(view)
        self.resource_version = resource_version

    def apply(self, event: Mapping[str, Any]) -> None:
        sandbox = event["object"]
        self.resource_version = sandbox["metadata"]["resourceVersion"]
        if event["type"] == "DELETED":
            self._forget(sandbox["metadata"]["name"])
        elif event["type"] in ("ADDED", "MODIFIED"):
            self._learn(sandbox_view(sandbox))

    def _learn(self, view: SandboxView) -> None:
        if self.views.get(view.name) != view:
            self.views[view.name] = view
            self._changed(view.name, view)

    def _forget(self, name: str) -> None:
        if self.views.pop(name, None) is not None:
            self._changed(name, None)


class SandboxWatch:
    """Keeps SandboxViews up to date, also after bookmarks, dropped watches, 410 Gone and restarts of the API server."""

    def __init__(self, api: KubeApi, selector: str, changed: Changed) -> None:
        self._api, self._selector = api, selector
        self._known = SandboxViews(changed)
        self.views: Mapping[str, SandboxView] = self._known.views
        self._task: asyncio.Task[None] | None = None
        self.is_current = False
        """Whether the watch is connected."""

    async def start(self) -> None:
        """List, and watch from there on. Raises ApiError if the list fails."""
        await self._list()
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _list(self) -> None:
        self._known.set(*await self._api.list_sandboxes(self._selector))
        self.is_current = True

    async def _follow(self) -> None:
        failures, must_list = 0, False
        while True:
            try:
                if must_list:
                    await self._list()
                    must_list = False
                async with self._api.watch_sandboxes(self._selector, self._known.resource_version) as events:
                    self.is_current = True
                    async for event in events:
                        self._known.apply(event)
                        failures = 0
            except ApiError as error:
                self.is_current = False
                failures += 1
                # After a broken connection, resume the watch. After an error response, list again, because our version
                # is invalid.
                must_list = must_list or error.status != 0
            except Exception:
                log.exception("the watch of Sandboxes failed; they are listed again")
                self.is_current, must_list = False, True
                failures += 1
            await asyncio.sleep(retry_pause(failures, random.random()))


T = TypeVar("T")


class WatchedClient(ExecutorClient):
    """After `end`, all calls, including running ones, raise SandboxFailure with its reason, because packets to the
    address of a dead pod are lost. `reason_of_end` returns the failure to raise for a lost connection, or None if the
    executor responds again.
    """

    def __init__(
        self, address: str, token: str, reason_of_end: Callable[[SandboxFailure], Awaitable[SandboxFailure | None]]
    ) -> None:
        super().__init__(address, token)
        self._reason_of_end = reason_of_end
        self._ended: Reason | None = None
        self._under_way: set[asyncio.Timeout] = set()

    def end(self, reason: Reason) -> None:
        if self._ended is None:
            self._ended = reason
            for scope in self._under_way:
                scope.reschedule(0)

    async def call(self, method: str, path: str, **arguments: Any) -> Reply:
        call = super().call
        is_repeatable = isinstance(arguments.get("body"), bytes | None)
        return await self._unless_ended(lambda: call(method, path, **arguments), is_repeatable=is_repeatable)

    async def _command(self, *arguments: Any) -> CommandResult | Running:
        command = super()._command
        return await self._unless_ended(lambda: command(*arguments), is_repeatable=True)

    async def stream(self, path: str, query: Query = ()) -> AsyncIterator[bytes]:
        chunks = super().stream(path, query)
        while (chunk := await self._unless_ended(lambda: anext(chunks, None), is_repeatable=False)) is not None:
            yield chunk

    async def _unless_ended(self, start: Callable[[], Awaitable[T]], *, is_repeatable: bool) -> T:
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
                    told = await self._reason_of_end(failure)
                    if told is None and is_repeatable:
                        return await self._unless_ended(start, is_repeatable=False)
                    raise self.marked_if_stopped(told or failure) from failure
        raise self.marked_if_stopped(SandboxFailure(self._ended.word, self._ended.message))
