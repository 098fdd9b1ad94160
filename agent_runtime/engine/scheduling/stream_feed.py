"""The groups of a job that stays open: taken from storage as they are submitted, given out there when they are done."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from agent_runtime.engine.context import RunContext
from agent_runtime.recording.stream import Feed, StreamRecord
from rollout_api.records import Result
from rollout_api.tasks import Task

SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 1.0
"""Between two looks for the next group. One request a second costs a store nothing; a step of training takes minutes."""


class StreamFeed:
    """This shard's part of a stream, oldest groups first."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._record = StreamRecord(context.record.store)
        self._most = asyncio.Semaphore(_most_in_flight(context))
        self._feed = Feed(self._record, context.shard.index)
        self._size = context.job.spec.group_size
        self.total: int | None = None
        """Rollouts of this shard in all, once the stream is closed."""

    async def groups(self) -> AsyncIterator[tuple[int, Task]]:
        """The shard's groups by number; ends when the stream is closed and all are out."""
        shard = self._context.shard
        await self._feed.open()
        number, pause = shard.index, SHORTEST_POLL_SECONDS
        while True:
            entry = await self._record.entry(number)
            if entry is None:
                closed = await self._record.closed()
                if closed is not None and number >= closed:
                    self.total = shard.groups(closed) * self._size
                    return
                await asyncio.sleep(pause)
                pause = min(LONGEST_POLL_SECONDS, pause * 2)
                continue
            await self._most.acquire()
            self._context.batches[number] = entry.label
            yield number, entry.task
            number, pause = number + shard.count, SHORTEST_POLL_SECONDS

    async def group_finished(self, group: int, task: Task, results: Sequence[Result]) -> None:
        """Give a group out, unless an earlier process has."""
        await self._feed.give_out(group, results)
        self._most.release()


def _most_in_flight(context: RunContext) -> int:
    stream = context.job.spec.tasks.stream
    assert stream is not None
    return max(1, stream.max_in_flight // context.shard.count)
