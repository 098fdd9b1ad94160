"""Groups of rollouts, side by side up to the concurrency of the run: who starts, who is cancelled, when a group is done.

A rollout takes attempts until one is sealed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.engine.attempt.attempt import Attempt
from agent_runtime.engine.context import RunContext
from agent_runtime.engine.events import AttemptFailed, GroupFinished, RolloutSealed
from agent_runtime.engine.scheduling.completion_rules import GroupState, abort_reason, plan_group
from agent_runtime.engine.scheduling.retry_rules import GiveUp, after_failures
from agent_runtime.plugins.of_group import STOPPED, GroupPlugins
from agent_runtime.recording.job_record import read_abort
from agent_runtime.recording.journal import read_attempt
from agent_runtime.recording.store import Store
from agent_runtime.statistics import with_group_advantages
from rollout_api.records import FailedRecord, Outcome, Result
from rollout_api.tasks import Task

T = TypeVar("T")


class RolloutRun:
    """Drives one rollout to its seal."""

    def __init__(self, context: RunContext, rollout: Rollout) -> None:
        self._context, self._rollout = context, rollout
        self._failures: list[tuple[int, FailedRecord]] = []
        self._attempt: Attempt | None = None
        self._number = 0
        self._has_read_earlier = False

    async def run(self) -> Result:
        """The rollout's sealed result. Cancelling it leaves everything as it is, to be resumed or sealed by `cancel`."""
        while True:
            await self._context.drain.gate()
            self._attempt = await self._claim()
            ended = await self._attempt.run()
            if isinstance(ended, Result):
                return ended
            self._failures.append((self._number, ended))
            decision = after_failures(
                [failure for _, failure in self._failures], self._context.job.spec.attempts, self._context.jitter
            )
            retry = not isinstance(decision, GiveUp)
            self._context.observer(
                AttemptFailed(self._rollout.index, self._number, ended.reason, ended.message, retry=retry)
            )
            if isinstance(decision, GiveUp):
                return await self._attempt.seal(Outcome.INFRA_FAILED, reason=ended.reason, message=ended.message)
            self._attempt = None
            self._number += 1
            await asyncio.sleep(decision.delay_seconds)

    async def cancel(self, reason: str, message: str) -> Result:
        """Seal it as Cancelled; after `run` was cancelled, or instead of it."""
        if self._attempt is None:
            self._attempt = await self._claim()
        return await self._attempt.seal(Outcome.CANCELLED, reason=reason, message=message)

    async def _claim(self) -> Attempt:
        if not self._has_read_earlier and self._rollout.index in self._context.begun:
            await self._read_earlier_attempts()
        self._has_read_earlier = True
        return await Attempt.claim(self._context, self._rollout, self._number, self._failures)

    async def _read_earlier_attempts(self) -> None:
        """Read the failures that an earlier process recorded; the latest attempt is resumed, failed or not."""
        numbers: Sequence[int] = await self._context.record.attempts(self._rollout.index)
        failures = []
        for number in sorted(numbers)[:-1]:
            records = await read_attempt(self._context.record, self._rollout.index, number)
            failed = next((record for record in records if isinstance(record, FailedRecord)), None)
            if failed is not None:
                failures.append((number, failed))
        self._failures, self._number = failures, max(numbers, default=0)


GroupCallback = Callable[[int, Task, Sequence[Result]], Awaitable[None]]


class JobAborted(Exception):
    """Too much is lost to infrastructure; the message says how much."""


async def abort_message(run: Store) -> str | None:
    """Why another process gave the run up; None where none did."""
    aborted = await read_abort(run)
    return None if aborted is None else f"an earlier process gave this run up: {aborted['message']}"


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
    """Runs the groups that are handed to it; `on_finished` gets the results of each one that is done."""

    def __init__(self, context: RunContext, on_finished: GroupCallback) -> None:
        self._context, self._on_finished = context, on_finished
        self._size = context.job.spec.group_size
        self._places = asyncio.Semaphore(context.job.spec.runners.concurrency)
        self._at_work: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with what ended a rollout from outside: the run cannot go on."""
        self._outcomes = context.results.outcomes
        self.given_out = 0
        """Groups of which `on_finished` has all results."""

    async def start(self, number: int, task: Task) -> None:
        """Start a group's unsealed members, each as soon as it has a place. Raises what ended an earlier rollout."""
        first = number * self._size
        results = self._context.results
        sealed = {m: result for m in range(self._size) if (result := results.get(first + m)) is not None}
        group = _Group(number, task, sealed, self._context.plugins_of_group(number, task))
        waiting = [member for member in range(self._size) if member not in group.results]
        if waiting:
            await group.plugins.begin()
            await group.plugins.judge(group.results)
        if self._apply_plan(group):
            await self._tell_plugins(group)
            await self._finish(group, earlier=True)
        for member in waiting:
            await self.unless_failed(self._places.acquire(), undo=self._places.release)
            if self._context.drain.requested:
                self._places.release()
                return
            rollout = Rollout.of(self._context.job, number, member, task, self._context.batches.get(number))
            run = RolloutRun(self._context, rollout)
            group.running[member] = self.spawn(self._run_member(group, member, run))

    async def drain(self) -> None:
        """Wait until everything that was started is done. Raises what ended a rollout from outside."""
        while self._at_work:
            await self.unless_failed(asyncio.wait(set(self._at_work)))
        if self.failure.done():
            self.failure.result()

    async def come_to_a_stop(self) -> None:
        """Return when a drain was asked for and every rollout that runs has come to a point at which it can stop."""
        drain = self._context.drain
        await drain.wait()
        while drain.parked < len(self._at_work):
            await drain.moved()

    async def stop(self) -> None:
        """Cancel everything that runs; what is journaled can be resumed."""
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()

    async def _run_member(self, group: _Group, member: int, run: RolloutRun) -> None:
        try:
            result = await self._result_of(group, member, run)
            group.results[member] = result
            await self._context.results.add(result)
            self._context.observer(RolloutSealed(result))
            # Before its place is free: whoever is next may not be needed any more.
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
            await self._tell_plugins(group)
            await self._finish(group)

    def _results_of(self, group: _Group) -> tuple[Result, ...]:
        return tuple(group.results[member] for member in range(self._size))

    async def _tell_plugins(self, group: _Group) -> None:
        """Tell them that the group has ended, unless an earlier process has: it is noted when they were told."""
        context = self._context
        if context.plugins.have("after_group") and group.number not in context.told_groups:
            await group.plugins.end(self._results_of(group))
            await context.record.note_told(group.number)

    async def _finish(self, group: _Group, *, earlier: bool = False) -> None:
        results = tuple(with_group_advantages(self._results_of(group), self._context.job.spec.reward))
        await self._on_finished(group.number, group.task, results)
        self.given_out += 1
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
        """Cancel whom the plan cancels; True when the group is done, once."""
        state = GroupState(self._size, {member: result.outcome for member, result in group.results.items()})
        completion = self._context.job.spec.completion
        plan = plan_group(
            state,
            min_completed=self._context.job.spec.min_completed,
            cancel_stragglers=completion.cancel_stragglers,
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
        """Work on it until `stop`. What it raises ends the run."""
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
        """The result of `waiting`. Raises what ended a rollout from outside.

        `undo` is called when `waiting` has its result, but this raises or the caller was cancelled.
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
