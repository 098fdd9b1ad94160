"""The plugins of one group, which may stop it early."""

import asyncio
from collections.abc import Mapping, Sequence

from agent_runtime.plugins.base import GroupInfo
from agent_runtime.plugins.plugins import Plugins
from rollout_api.records import Result

STOPPED = "StoppedByPlugin"
"""`Result.reason` of members that a plugin made unnecessary."""


class GroupPlugins:
    """Calls the hooks for the first members of the group, in their order, once for each number of members."""

    def __init__(self, plugins: Plugins, group: GroupInfo, run: str) -> None:
        self._plugins, self._group, self._key = plugins, group, f"{run}/group-{group.number}"
        self._asked, self._asking = 0, asyncio.Lock()
        self.stopped: str | None = None
        """Why the rest of the group is no longer needed, with the plugin's name."""

    async def begin(self) -> None:
        await self._notify("before_group")

    async def end(self, results: Sequence[Result]) -> None:
        await self._notify("after_group", results=results)

    async def judge(self, results: Mapping[int, Result]) -> None:
        """Call the hooks for each member that has ended, in the members' order; `results` by member."""
        if not self._plugins.have("should_stop_group"):
            return
        async with self._asking:
            while self.stopped is None and self._asked in results and self._asked + 1 < self._group.size:
                self._asked += 1
                first = [results[member] for member in range(self._asked)]
                key = f"{self._key}:after-{self._asked}"
                async for answer in self._plugins.ask("should_stop_group", key, group=self._group, results=first):
                    self._plugins.count_for_job(answer.call)
                    if answer.value and self.stopped is None:
                        self.stopped = f"{answer.call.plugin}: {answer.value}"

    async def _notify(self, hook: str, **arguments: object) -> None:
        async for answer in self._plugins.ask(hook, self._key, group=self._group, **arguments):
            self._plugins.count_for_job(answer.call)
