"""Groups of rollouts, concurrent up to the run's limit. A rollout makes attempts until one is sealed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.engine.attempt_phases import Attempt
from agent_runtime.engine.context import RunContext
from agent_runtime.engine.events import AttemptFailed, GroupFinished, RolloutSealed
from agent_runtime.engine.scheduling.completion_rules import abort_reason, plan_group
from agent_runtime.engine.scheduling.retry_rules import retry_delay
from agent_runtime.plugins.plugins import STOPPED, GroupPlugins
from agent_runtime.recording.job_record import read_abort
from agent_runtime.recording.reader import read_attempt
from agent_runtime.recording.store import Store
from agent_runtime.statistics import with_group_advantages
from rollout_api.records import FailedRecord, Outcome, Result
from rollout_api.tasks import Task

T = TypeVar("T")


class RolloutRun:
    """Runs one rollout until it is sealed."""

    def __init__(self, context: RunContext, rollout: Rollout) -> None:
        self._context, self._rollout = context, rollout
        self._failures: list[tuple[int, FailedRecord]] = []
        self._attempt: Attempt | None = None
        self._number = 0
        self._has_read_earlier = False

    async def run(self) -> Result:
        """Return the rollout's sealed result. If this is cancelled, the rollout can be resumed, or sealed by `cancel`."""
        while True:
            await self._context.drain.park_if_requested()
            self._attempt = await self._claim()
            ended = await self._attempt.run()
            if isinstance(ended, Result):
                return ended
            self._failures.append((self._number, ended))
            delay = retry_delay(
                [failure for _, failure in self._failures], self._context.job.spec.attempts, self._context.jitter
            )
            self._context.observer(
                AttemptFailed(self._rollout.index, self._number, ended.reason, ended.message, retry=delay is not None)
            )
            if delay is None:
                return await self._attempt.seal(Outcome.INFRA_FAILED, reason=ended.reason, message=ended.message)
            self._attempt = None
            self._number += 1
            await asyncio.sleep(delay)

    async def cancel(self, reason: str, message: str) -> Result:
        """Seal the rollout as Cancelled; after `run` was cancelled, or instead of it."""
        if self._attempt is None:
            self._attempt = await self._claim()
        return await self._attempt.seal(Outcome.CANCELLED, reason=reason, message=message)

    async def _claim(self) -> Attempt:
        if not self._has_read_earlier and self._rollout.index in self._context.begun:
            await self._read_earlier_attempts()
        self._has_read_earlier = True
        if self._context.check_holder is not None:
            await self._context.check_holder()
        return await Attempt.claim(self._context, self._rollout, self._number, self._failures)

    async def _read_earlier_attempts(self) -> None:
        """Read failures recorded by an earlier process. The latest attempt is resumed, failed or not."""
        numbers: Sequence[int] = await self._context.record.attempts(self._rollout.index)
        failures = []
        for number in sorted(numbers)[:-1]:
            records = await read_attempt(self._context.record.store, self._rollout.index, number)
            failed = next((record for record in records if isinstance(record, FailedRecord)), None)
            if failed is not None:
                failures.append((number, failed))
        self._failures, self._number = failures, max(numbers, default=0)


GroupCallback = Callable[[int, Task, Sequence[Result]], Awaitable[None]]


class JobAborted(Exception):
    """Too many rollouts were lost to infrastructure; the message says how many."""


async def abort_message(run: Store) -> str | None:
    """Return why another process aborted the run; None if none did."""
    aborted = await read_abort(run)
    return None if aborted is None else f"an earlier process aborted this run: {aborted['message']}"


async def write_results(context: RunContext, aborted: str | None = None) -> Mapping[str, object] | None:
    """Write the end of this shard, and the results of the job if all shards have ended; return its statistics then."""
    verdict = {"sealed": len(context.results), "aborted": aborted, "plugins": context.plugins.of_job}
    await context.results.end()
    await context.record.finish_shard(context.shard.index, verdict)
    return await context.record.finish(context.shard.count)


@dataclass
class _Group:
    number: int
    task: Task
    results: dict[int, Result]
    """By member."""
    plugins: GroupPlugins
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    finished: bool = False


class Groups:
    """Runs groups; `on_finished` gets the results of each finished group."""

    def __init__(self, context: RunContext, on_finished: GroupCallback) -> None:
        self._context, self._on_finished = context, on_finished
        self._size = context.job.spec.group_size
        self._places = asyncio.Semaphore(context.job.spec.runners.concurrency)
        self._at_work: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when a rollout fails externally: the run cannot continue."""
        self._outcomes = context.results.outcomes
        self.published = 0
        """Groups whose results `on_finished` has received."""

    async def start(self, number: int, task: Task) -> None:
        """Start a group's unsealed members, each when a place is free. Raises an earlier rollout's external failure."""
        first = number * self._size
        results = self._context.results
        sealed = {m: result for m in range(self._size) if (result := results.get(first + m)) is not None}
        group = _Group(number, task, sealed, self._context.plugins_of_group(number, task))
        waiting = [member for member in range(self._size) if member not in group.results]
        if waiting:
            await group.plugins.begin()
            await group.plugins.judge(group.results)
        if self._apply_plan(group):
            await self._notify_plugins(group)
            await self._finish(group, earlier=True)
        for member in waiting:
            await self.unless_failed(self._places.acquire(), undo=self._places.release)
            if self._context.drain.requested:
                self._places.release()
                return
            branching, batch = self._context.origins.get(number), self._context.batches.get(number)
            origin = "" if branching is None else branching.origin.name
            rollout = Rollout.of(self._context.job, number, member, task, batch, origin=origin)
            run = RolloutRun(self._context, rollout)
            self.spawn(self._run_member(group, member, run))

    async def drain(self) -> None:
        """Wait until all started rollouts have ended. Raises a rollout's external failure."""
        while self._at_work:
            await self.unless_failed(asyncio.wait(set(self._at_work)))
        if self.failure.done():
            self.failure.result()

    async def wait_until_drained(self) -> None:
        """Return when a drain is requested and every running rollout has parked or ended."""
        drain = self._context.drain
        await drain.wait()
        while drain.parked < len(self._at_work):
            await drain.moved()

    async def stop(self) -> None:
        """Cancel all running rollouts; journaled work can be resumed."""
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()

    async def _run_member(self, group: _Group, member: int, run: RolloutRun) -> None:
        at_work = asyncio.current_task()
        assert at_work is not None
        # Register the job only now, because an asyncio task that is cancelled before it begins never runs.
        group.running[member] = at_work
        try:
            with self._context.first_ends.running():
                result = await self._result_of(group, member, run)
            group.results[member] = result
            await self._context.results.add(result)
            self._context.observer(RolloutSealed(result))
            # Call this before the place becomes free: it may cancel the rollout that would start next.
            await group.plugins.judge(group.results)
        finally:
            self._places.release()
            group.running.pop(member, None)
        limit = self._context.job.spec.completion.max_infra_failure_fraction
        self._outcomes[result.outcome] += 1
        if (reason := abort_reason(self._outcomes, limit)) is not None:
            await self._context.record.abort("InfraFailures", reason)
            self._context.finished = True
            raise JobAborted(reason)
        if self._apply_plan(group):
            await self._context.provider.forget_group(f"g{group.number}")
            await self._notify_plugins(group)
            await self._finish(group)

    def _results_of(self, group: _Group) -> tuple[Result, ...]:
        return tuple(group.results[member] for member in range(self._size))

    async def _notify_plugins(self, group: _Group) -> None:
        """Report the group's end to plugins unless an earlier process has; the report is recorded."""
        context = self._context
        if context.plugins.have("after_group") and group.number not in context.reported_groups:
            await group.plugins.end(self._results_of(group))
            await context.record.record_report(group.number)

    async def _finish(self, group: _Group, *, earlier: bool = False) -> None:
        results = tuple(with_group_advantages(self._results_of(group), self._context.job.spec.reward))
        await self._on_finished(group.number, group.task, results)
        self.published += 1
        self._context.observer(GroupFinished(group.number, group.task.name, results, earlier))

    async def _result_of(self, group: _Group, member: int, run: RolloutRun) -> Result:
        if member not in group.unwanted:
            try:
                return await run.run()
            except asyncio.CancelledError:
                if member not in group.unwanted:
                    raise
        if group.plugins.stopped is not None:
            return await run.cancel(STOPPED, group.plugins.stopped)
        return await run.cancel("GroupComplete", "enough members of its group are Completed")

    def _apply_plan(self, group: _Group) -> bool:
        """Cancel the members that the plan cancels; True once, when the group is finished."""
        spec = self._context.job.spec
        plan = plan_group(
            self._size,
            {member: result.outcome for member, result in group.results.items()},
            min_completed=spec.min_completed,
            cancel_stragglers=spec.completion.cancel_stragglers,
            stopped=group.plugins.stopped is not None,
        )
        for member in plan.cancel:
            if member not in group.unwanted:
                group.unwanted.add(member)
                if (running := group.running.get(member)) is not None:
                    running.cancel()
        is_new, group.finished = plan.finished and not group.finished, plan.finished
        return is_new

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until `stop`. Its exception ends the run."""
        task = asyncio.create_task(work)
        self._at_work.add(task)
        task.add_done_callback(self._work_ended)
        return task

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._at_work.discard(task)
        self._context.drain.note_end()
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def unless_failed(self, waiting: Coroutine[Any, Any, T], undo: Callable[[], None] = lambda: None) -> T:
        """Return the result of `waiting`. Raises a rollout's external failure.

        If this raises or the caller is cancelled although `waiting` has a result, `undo` is called.
        """
        task = asyncio.create_task(waiting)
        try:
            await asyncio.wait([task, self.failure], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            if self.failure.done():
                self.failure.result()
        except BaseException:
            if not task.cancel():
                undo()
            raise
        return await task
