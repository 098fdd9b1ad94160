"""Submit tasks to a stream job and read its results, from a trainer in the cluster or from a laptop.

    stream = await JobStream.open("s3://bucket/jobs/train-0123abcd")
    await stream.submit(task, label="step-1")
    async for group in stream.groups():
        ...

Clients and runners communicate only through object storage, so each of them may be restarted at any time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Self

from agent_runtime.engine.session import FinishedGroup
from agent_runtime.recording.branches import Branch
from agent_runtime.recording.expert_arrays import ExpertArray, read_experts
from agent_runtime.recording.job_record import read_abort
from agent_runtime.recording.reader import NoSuchRun, RunFolder, sealed_tokens
from agent_runtime.recording.stream import PublishedGroup, StreamRecord
from rollout_api.records import Result
from rollout_api.tasks import Task
from rolloutctl.client import RunAborted
from rolloutctl.errors import CommandError
from rolloutctl.runs import find_run_folder

POLL_SECONDS = 0.5
"""Interval between reads of new results. Each read takes one request for each shard, and a training step takes minutes."""


class JobStream:
    """The stream of one run. Several clients may submit concurrently."""

    def __init__(self, run: RunFolder) -> None:
        if run.job.spec.tasks.stream is None:
            raise CommandError(
                f"{run.folder} has a fixed list of tasks, so nothing can be submitted to it",
                hint="An open job has tasks: {stream: {}}.",
            )
        self._store, self._record = run.store, StreamRecord(run.store)
        self._shards = run.job.spec.runners.replicas

    @property
    def uri(self) -> str:
        """URI of the recorded run."""
        return self._store.uri

    @classmethod
    async def open(cls, reference: str, *, patience_seconds: float = 0) -> Self:
        """Open the stream of a run by its URI or folder, its manifest, or its name in ./out.

        A run exists once its runners have started. If it does not exist yet, wait up to `patience_seconds`. Raises
        CommandError or NoSuchRun if it does not exist by then, CommandError if it is not a stream job, StorageError.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                run = await find_run_folder(reference, may_be_empty=True)
            except (CommandError, NoSuchRun):
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(POLL_SECONDS)
            else:
                return cls(run)

    async def submit(self, task: Task | Mapping[str, Any], label: str | None = None) -> int:
        """Submit a task, or a mapping with its fields. Returns its number when it is stored durably.

        Raises StreamClosed, ValidationError.
        """
        return await self._record.submit(Task.model_validate(task), label)

    async def close(self) -> int:
        """Close the stream; the job completes when all groups are finished. Returns the number of groups."""
        return await self._record.close()

    async def groups(self, skip: Collection[int] = ()) -> AsyncIterator[FinishedGroup]:
        """Yield finished groups until the stream is closed and all are finished. Groups of one runner come in order.

        `skip` has numbers of groups to leave out, such as those in the trainer's checkpoint. Raises RunAborted after the
        last group of an aborted run.
        """
        following = dict.fromkeys(range(self._shards), 0)
        seen = 0
        aborted: dict[str, Any] | None = None
        while True:
            found = await asyncio.gather(*(self._record.published_group(shard, at) for shard, at in following.items()))
            for fed in found:
                if fed is not None:
                    following[fed.shard] += 1
                    seen += 1
                    if fed.group not in skip:
                        yield await self._finished(fed)
            if not any(found):
                if seen == await self._record.closed():
                    return
                if aborted is not None:
                    raise RunAborted(aborted["message"])
                # Read results once more before RunAborted is raised: some may have been written before the abort.
                aborted = await read_abort(self._store)
                await asyncio.sleep(POLL_SECONDS)

    async def tokens(self, result: Result) -> list[Branch]:
        """Return the training data of a finished rollout, one entry for each branch; empty for a masked rollout.

        Raises NoTokenIds if the model returned none, and RecordCorrupt.
        """
        return await sealed_tokens(self._store, result.index)

    async def routed_experts(self, branch: Branch) -> ExpertArray | None:
        """Return the routed experts of one of these token sequences; None unless `model.routedExperts` is set. Raises
        RecordCorrupt.
        """
        return await read_experts(self._store, branch)

    async def _finished(self, fed: PublishedGroup) -> FinishedGroup:
        entry = await self._record.entry(fed.group)
        assert entry is not None, "nothing removes an entry"
        return FinishedGroup(fed.group, entry.task.name, entry.label, fed.results)
