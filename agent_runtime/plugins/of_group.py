"""The plugins of one group: whether it is worth going on with."""

import asyncio
from collections.abc import Mapping, Sequence

from agent_runtime.plugins.base import GroupInfo
from agent_runtime.plugins.plugins import Plugins
from rollout_api.records import Result

STOPPED = "StoppedByPlugin"
"""`Result.reason` of the members that a plugin had no need of."""


class GroupPlugins:
    """Questions are asked about the first members of the group, in their order, each number of them once.

    Plugins get copies: nothing that they do to a result reaches anybody else.
    """

    def __init__(self, plugins: Plugins, group: GroupInfo, run: str) -> None:
        self._plugins, self._group, self._key = plugins, group, f"{run}/group-{group.number}"
        self._asked, self._asking = 0, asyncio.Lock()
        self._copies: dict[int, Result] = {}
        self.stopped: str | None = None
        """Why the rest of the group is not needed any more, with the plugin's name."""

    async def begin(self) -> None:
        await self._tell("before_group")

    async def end(self, results: Sequence[Result]) -> None:
        copies = [self._copy(member, result) for member, result in enumerate(results)]
        await self._tell("after_group", results=copies)

    async def judge(self, results: Mapping[int, Result]) -> None:
        """Ask about every number of first members that have ended since; `results` by member."""
        if not self._plugins.have("should_stop_group"):
            return
        async with self._asking:
            while self.stopped is None and self._asked in results and self._asked + 1 < self._group.size:
                self._asked += 1
                first = [self._copy(member, results[member]) for member in range(self._asked)]
                key = f"{self._key}:after-{self._asked}"
                async for answer in self._plugins.ask("should_stop_group", key, group=self._group, results=first):
                    self._plugins.count_for_job(answer.call)
                    if answer.value and self.stopped is None:
                        self.stopped = f"{answer.call.plugin}: {answer.value}"

    def _copy(self, member: int, result: Result) -> Result:
        if member not in self._copies:
            self._copies[member] = result.model_copy(deep=True)
        return self._copies[member]

    async def _tell(self, hook: str, **arguments: object) -> None:
        async for answer in self._plugins.ask(hook, self._key, group=self._group, **arguments):
            self._plugins.count_for_job(answer.call)
