"""A ModelServer with the operator's own decisions: servers behind gateways, a policy updater, and a runner's model."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from agent_runtime.models.pool.fleet import CONFIRM_SECONDS, View
from agent_runtime.models.pool.model import ServedModel
from tests.integration.model_server.fleet import Fleet, end
from tests.integration.served.fleet import Watched
from tests.support.policy_updater import MODEL

ME = "job/0"
T = TypeVar("T")


class OperatedFleet(Fleet):
    """`async with OperatedFleet(folder, servers=3, tokens_per_second=60) as fleet`; its one runner is `model`."""

    def __init__(self, folder: Path, servers: int, tokens_per_second: int) -> None:
        super().__init__(folder, servers, runners=0, tokens_per_second=tokens_per_second)
        self.arrived = Counter[str]()
        """Tokens of answers that have come here, by URL of the server."""
        self.mixed = 0
        """Updates whose load did not wait for this runner, on a machine that is too busy."""
        self.model = ServedModel(MODEL, self, lambda url: Watched(url, self.arrived), me=ME, sample_seconds=0.2)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._stack.push_async_callback(self.model.close)
        return self

    def run(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the coroutine until the fleet ends. It is ended first, because gateways wait for their calls, and a
        job makes more of them.
        """
        running = asyncio.create_task(job)
        self._stack.push_async_callback(end, [running])
        return running

    async def changes(self) -> AsyncIterator[View]:
        """See Directory. Also reports what the runner acknowledges."""
        loop = asyncio.get_running_loop()
        last, told, mixed = None, 0.0, 0
        while True:
            if self.acknowledged.get(ME) != self.model.acknowledged:
                self.acknowledged[ME] = self.model.acknowledged
                self.tell()
            asked, status = loop.time(), self.status
            if ME in status.policy.mixed and status.policy.update != mixed:
                mixed, self.mixed = status.policy.update, self.mixed + 1
            if status != last or asked - told > CONFIRM_SECONDS:
                last, told = status, asked
                yield View(status, asked)
            await asyncio.sleep(0.02)
