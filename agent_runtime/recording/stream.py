"""A stream job in storage: groups are submitted under `stream/` by number, finished ones are published under `feed/`.

Entries are create-only and numbered without gaps, so several clients may submit concurrently, and each runner takes
every n-th number. The last entry closes the stream; `stream/closed.json` repeats its number for runners that do not
read every entry.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.segments import RecordCorrupt, compact_json
from agent_runtime.recording.store import Store
from rollout_api.records import Result
from rollout_api.tasks import Task

CLOSED = "stream/closed.json"
_END = b'{"closed":true}'


class StreamClosed(Exception):
    """The stream is closed and accepts no further groups."""


@dataclass(frozen=True)
class StreamEntry:
    """A submitted group."""

    number: int
    """Also the number of its group."""
    task: Task
    label: str | None
    """The submitter's label, returned with the results: a batch, a training step."""


@dataclass(frozen=True)
class PublishedGroup:
    """A finished group in the feed of a shard, under `sequence`."""

    shard: int
    sequence: int
    group: int
    results: tuple[Result, ...]


class StreamRecord:
    """`stream/` and `feed/` below a run's folder."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: int | None = None
        self._submitting = asyncio.Lock()

    async def claim(self) -> Callable[[], Awaitable[None]]:
        """Claim the run for a session. Return a check that raises Superseded after a later session's claim."""
        body = compact_json({"holder": secrets.token_hex(8)})
        number = len(await self._store.list("holders"))
        while not await self._store.create(f"holders/{number}.json", body):
            number += 1

        async def check() -> None:
            if await self._store.get(f"holders/{number + 1}.json") is not None:
                raise Superseded(f"{self._store.uri}: a later session of this job has taken it over")

        return check

    async def submit(self, task: Task, label: str | None = None) -> int:
        """Submit a group; it is durable when this returns its number. Concurrent submits are numbered one after the
        other.

        Raises StreamClosed.
        """
        # The id distinguishes equal submissions of two clients: `create` treats equal bytes under one key as the same
        # write.
        body = compact_json({"task": task.wire(), "label": label, "id": secrets.token_hex(8)})
        async with self._submitting:
            number = await self._append(body)
            self._next = number + 1
        return number

    async def entry(self, number: int) -> StreamEntry | None:
        """Return the group of that number; None if it does not exist yet, or if the stream ends there."""
        data = await self._store.get(f"stream/{number}.json")
        if data is None:
            return None
        if data == _END:
            # The process that closed the stream may have died before it wrote this.
            await self._store.create(CLOSED, compact_json({"groups": number}))
            return None
        try:
            entry = json.loads(data)
            return StreamEntry(number, Task.model_validate(entry["task"]), entry["label"])
        except (ValueError, TypeError, KeyError) as error:
            raise RecordCorrupt(f"stream/{number}.json", f"is not a submitted group: {error}") from error

    async def numbers(self) -> list[int]:
        """Return the numbers of all entries in order: the groups, and the end of a closed stream."""
        names = [meta.key.rsplit("/", 1)[-1].removesuffix(".json") for meta in await self._store.list("stream")]
        return sorted(int(name) for name in names if name.isdigit())

    async def close(self) -> int:
        """Close the stream; return the number of groups. Idempotent."""
        async with self._submitting:
            with contextlib.suppress(StreamClosed):
                await self.entry(await self._append(_END))
        groups = await self.closed()
        assert groups is not None
        return groups

    async def closed(self) -> int | None:
        """Return the number of groups, None while the stream is open."""
        data = await self._store.get(CLOSED)
        return None if data is None else int(json.loads(data)["groups"])

    async def publish(self, shard: int, sequence: int, results: Sequence[Result]) -> bool:
        """Publish a finished group; False if another group has that number, whose entry is kept."""
        return await self._store.create(_feed_key(shard, sequence), compact_json([result.wire() for result in results]))

    async def published_group(self, shard: int, sequence: int) -> PublishedGroup | None:
        """Return what a shard published under that number, None if nothing yet."""
        data = await self._store.get(_feed_key(shard, sequence))
        if data is None:
            return None
        results = tuple(Result.model_validate(result) for result in json.loads(data))
        return PublishedGroup(shard, sequence, results[0].group, results)

    async def published_groups(self, shard: int) -> dict[int, int]:
        """Return the groups that a shard has published, with their sequence numbers."""
        numbers = range(len(await self._store.list(f"feed/{shard}")))
        published = await self._store.get_all([_feed_key(shard, number) for number in numbers])
        return {
            json.loads(data)[0]["group"]: number
            for number, data in zip(numbers, published, strict=True)
            if data is not None
        }

    async def _append(self, body: bytes) -> int:
        """Create the next entry; return its number. Raises StreamClosed."""
        if self._next is None:
            self._next = max(await self.numbers(), default=0)
        while not await self._store.create(f"stream/{self._next}.json", body):
            if await self.entry(self._next) is None:
                raise StreamClosed(
                    f"{self._store.uri} was closed with {self._next} groups; start another job to run more"
                )
            self._next += 1
        return self._next


class Feed:
    """Publishes the finished groups of a shard, each once, under numbers without gaps."""

    def __init__(self, record: StreamRecord, shard: int) -> None:
        self._record, self._shard = record, shard
        self._given: dict[int, int] = {}
        """Sequence numbers by group."""
        self._giving = asyncio.Lock()

    async def open(self) -> None:
        """Read what earlier processes have published."""
        self._given = await self._record.published_groups(self._shard)

    async def publish(self, group: int, results: Sequence[Result]) -> int:
        """Publish a group unless it was published; return its sequence number."""
        async with self._giving:
            while group not in self._given:
                sequence = len(self._given)
                if not await self._record.publish(self._shard, sequence, results):
                    # An earlier process, considered dead, has published a group meanwhile.
                    other = await self._record.published_group(self._shard, sequence)
                    assert other is not None, "entries are never removed"
                    self._given[other.group] = sequence
                else:
                    self._given[group] = sequence
            return self._given[group]


def _feed_key(shard: int, sequence: int) -> str:
    return f"feed/{shard}/{sequence}.json"
