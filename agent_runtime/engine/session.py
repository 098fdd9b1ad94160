"""A run that stays open in a trainer's own process: it accepts tasks during training and yields finished groups."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent_runtime.engine.context import RunContext
from agent_runtime.engine.events import Observer
from agent_runtime.engine.groups import Groups, JobAborted, abort_message, write_results
from agent_runtime.engine.opening import RunEnvironment, open_run, refuse_text_only
from agent_runtime.engine.scheduling.first_ends import FirstEnds
from agent_runtime.models.base import Model
from agent_runtime.models.factory import open_model
from agent_runtime.recording.branches import Branch
from agent_runtime.recording.expert_arrays import ExpertArray, read_experts
from agent_runtime.recording.messages import linear
from agent_runtime.recording.reader import read_attempt, sealed_tokens
from agent_runtime.recording.stream import Feed, StreamClosed, StreamRecord
from agent_runtime.sandboxes.base import SandboxProvider
from rollout_api.model import ModelSpec
from rollout_api.records import Record, Result, Seal
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Provider
from rollout_api.tasks import Task

LOOK_SECONDS = 1.0
"""Interval at which a waiting iteration looks for what other clients have submitted. A look takes two requests."""


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose members all have results. `sequence` is what `submit` returned for it, and `task` its task's name."""

    sequence: int
    task: str
    label: str | None
    results: tuple[Result, ...]


class RolloutSession:
    """An open run of a job with `tasks: {stream: {}}`. Sandboxes and connections persist between submissions.

    What was submitted is durable before `submit` returns. A session that is opened again under the same name continues
    the unfinished groups, and yields the finished groups again in the same order. A trainer skips as many of them as its
    checkpoint counts.
    """

    def __init__(
        self,
        job: RolloutJob,
        *,
        base_dir: Path,
        provider: Provider | SandboxProvider | None = None,
        model: Model | ModelSpec | None = None,
        new: bool = False,
        observer: Observer = lambda event: None,
        plugins: Sequence[object] = (),
        private: Sequence[Path] = (),
        first_ends: FirstEnds | None = None,
    ) -> None:
        """Workspaces on this machine cannot see `private`. Sessions with the same `first_ends` count the ends of their first
        agents together. The other arguments are those of `run_job`. API keys and storage credentials are read from
        environment variables.
        """
        if job.spec.tasks.stream is None:
            raise ValueError(
                "a session needs a job with tasks: {stream: {}}; a job with a list of tasks is run as a whole"
            )
        run_environment = RunEnvironment(
            base_dir, os.environ, provider, model, plugins=plugins, private=private, first_ends=first_ends
        )
        self._run = open_run(job, [], run_environment, new=new, observer=observer)
        self._in_flight = asyncio.Semaphore(job.spec.tasks.stream.max_in_flight)
        self._finished: dict[int, FinishedGroup] = {}
        """Finished groups that were not yielded, by their number in the feed."""
        self._yielded = 0
        self._news = asyncio.Event()
        """Set when iteration may have something to yield."""
        self._unfinished: dict[int, str | None] = {}
        """Labels of unfinished groups, by sequence number."""
        self._submitting = asyncio.Lock()
        self._models: list[Model] = []
        """Models that `use_model` opened. Replaced ones may still have calls in progress."""
        self._next = 0
        self._total: int | None = None
        """Total number of groups, once the stream is closed."""
        self._closed = self._resumed = self._has_ended = False

    async def __aenter__(self) -> Self:
        """Open storage, sandboxes and model, and resume the groups of an earlier session. Raises JobAborted if the run
        was aborted.
        """
        self._context: RunContext = await self._run.__aenter__()
        self._stream = StreamRecord(self._context.record.store)
        self._feed = Feed(self._stream, shard=0)
        self._groups = Groups(self._context, self._group_finished)
        try:
            await self._resume()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self._resumed = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave unfinished groups for the next session."""
        self._has_ended = True
        await self._groups.stop()
        self._context.finished |= self._resumed and not self._unfinished
        try:
            for model in self._models:
                await model.close()
            if self._resumed and self._is_complete:
                await write_results(self._context)
        finally:
            await self._run.__aexit__(kind, error, traceback)

    async def submit(self, task: Task | Mapping[str, Any], label: str | None = None) -> int:
        """Submit a task, or its fields as in a manifest; waits while `maxInFlight` groups are unfinished.

        Returns its sequence number. `label` (a batch, a training step) is returned with the group. A cancelled call may
        still have submitted it: then its group is yielded like any other. Raises ValidationError, and StreamClosed if
        another client has closed the stream. Groups of other clients are yielded as well.
        """
        task = Task.model_validate(task)
        if self._closed:
            raise ValueError("the session is closed and accepts no further tasks")
        await self._groups.unless_failed(self._in_flight.acquire(), undo=self._in_flight.release)
        return await asyncio.shield(self._submit(task, label))

    async def _submit(self, task: Task, label: str | None) -> int:
        async with self._submitting:
            try:
                sequence = await self._stream.submit(task, label)
                await self._take_in(sequence)
            except BaseException as error:
                self._in_flight.release()
                if isinstance(error, StreamClosed):
                    await self._end()
                raise
            self._begin(sequence, task, label, in_flight=True)
            return sequence

    async def _take_in(self, end: int) -> None:
        """Begin groups with lower numbers that other clients, such as `rolloutctl stream submit`, have submitted."""
        for number in range(self._next, end):
            entry = await self._stream.entry(number)
            assert entry is not None, "sequence numbers have no gaps, and entries are never removed"
            self._begin(number, entry.task, entry.label, in_flight=False)

    async def close(self) -> None:
        """Close the stream; iteration ends when all groups were yielded."""
        async with self._submitting:
            await self._end()

    async def _end(self) -> None:
        self._closed = True
        total = await self._stream.close()
        await self._take_in(total)
        self._total = total
        self._news.set()

    async def abandon(self, reason: str, message: str) -> None:
        """Abort the run: it cannot be resumed, and its sandboxes are deleted when the session ends."""
        self._context.finished = True
        await self._groups.stop()
        await self._context.record.abort(reason, message)

    @property
    def submitted(self) -> int:
        """Return the number of submitted groups, earlier sessions included."""
        return self._next

    @property
    def _is_complete(self) -> bool:
        """Whether the stream is closed and all its groups are finished."""
        return self._next == self._total and not self._unfinished

    @property
    def uri(self) -> str:
        """URI of the recorded run."""
        return self._context.record.store.uri

    async def seals(self) -> Mapping[int, Seal]:
        """Return the sealed rollouts, with their verdicts, by index."""
        return await self._context.record.seals()

    async def use_model(self, model: ModelSpec | Model) -> None:
        """Use another model for all further model calls, those of running rollouts included. A later session begins with the
        model that it is given.
        """
        if isinstance(model, ModelSpec):
            replacement = open_model(model, os.environ)
            self._models.append(replacement)
        else:
            replacement = model
        await replacement.check()
        refuse_text_only(self._context.job, replacement)
        self._context.model = replacement

    async def records(self, result: Result) -> list[Record]:
        """Return the journal of a finished rollout: model calls with their tokens, tool calls. Raises RecordCorrupt."""
        return linear(await read_attempt(self._context.record.store, result.index, result.attempt))

    async def tokens(self, result: Result) -> list[Branch]:
        """Return the training data of a finished rollout, one entry for each branch; empty for a masked rollout.

        Raises NoTokenIds if the model returned none, and RecordCorrupt.
        """
        return await sealed_tokens(self._context.record.store, result.index)

    async def routed_experts(self, branch: Branch) -> ExpertArray | None:
        """Return the routed experts of one of these token sequences; None unless `model.routedExperts` is set. Raises
        RecordCorrupt.
        """
        return await read_experts(self._context.record.store, branch)

    def __aiter__(self) -> AsyncIterator[FinishedGroup]:
        """Yield finished groups in the order in which they have finished, earlier sessions included."""
        return self

    async def __anext__(self) -> FinishedGroup:
        """Return the next finished group. Raises the error that ended the run externally (storage, abort)."""
        while self._yielded not in self._finished:
            if self._is_complete:
                raise StopAsyncIteration
            self._news.clear()
            await self._groups.unless_failed(self._news_or_look())
        self._yielded += 1
        return self._finished.pop(self._yielded - 1)

    async def _news_or_look(self) -> None:
        try:
            await asyncio.wait_for(self._news.wait(), LOOK_SECONDS)
        except TimeoutError:
            if self._total is None:
                await self._take_in_all()

    async def _take_in_all(self) -> None:
        """Begin what other clients have submitted since, and notice that one of them has closed the stream."""
        async with self._submitting:
            while (entry := await self._stream.entry(self._next)) is not None:
                self._begin(entry.number, entry.task, entry.label, in_flight=False)
            if await self._stream.closed() == self._next:
                self._closed, self._total = True, self._next

    async def _resume(self) -> None:
        if (aborted := await abort_message(self._context.record.store)) is not None:
            self._context.finished = True
            raise JobAborted(aborted)
        self._context.check_holder = await self._stream.claim()
        await self._feed.open()
        for number in await self._stream.numbers():
            entry = await self._stream.entry(number)
            if entry is None:  # an earlier session closed the stream
                self._closed, self._total = True, number
                break
            self._begin(number, entry.task, entry.label, in_flight=False)

    def _begin(self, sequence: int, task: Task, label: str | None, *, in_flight: bool) -> None:
        if self._has_ended:
            return  # a cancelled `submit` was stored afterwards: the next session runs its group
        self._next = sequence + 1
        self._unfinished[sequence] = self._context.batches[sequence] = label

        async def start() -> None:
            if not in_flight:
                await self._in_flight.acquire()
            await self._groups.start(sequence, task)

        self._groups.spawn(start())

    async def _group_finished(self, group: int, task: Task, results: Sequence[Result]) -> None:
        number = await self._feed.publish(group, results)
        self._finished[number] = FinishedGroup(group, task.name, self._unfinished.pop(group), tuple(results))
        self._in_flight.release()
        self._news.set()
