"""Run a job in this process: embedded on a laptop, or as a runner pod for its shard."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from agent_runtime.agents.base import Agent
from agent_runtime.engine.branching.sources import Origin, find_origins
from agent_runtime.engine.context import RunContext
from agent_runtime.engine.events import Event, JobEnded, JobStarted, JobSummary, Observer
from agent_runtime.engine.groups import Groups, JobAborted, abort_message, write_results
from agent_runtime.engine.health import Health
from agent_runtime.engine.opening import RunEnvironment, about_services, open_run
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.shard import WHOLE_JOB, Shard
from agent_runtime.models.base import Model
from agent_runtime.recording.job_record import existing_run, output_uri
from agent_runtime.recording.store import Store
from agent_runtime.recording.stream import Feed, StreamRecord
from agent_runtime.sandboxes.base import SandboxProvider
from agent_runtime.tasks import LoadedTasks, load_tasks
from agent_runtime.tools.base import Tool
from rollout_api.model import ModelSpec
from rollout_api.records import Outcome, Result
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Provider
from rollout_api.tasks import Task, TaskStream

SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 1.0
"""Bounds of the interval between checks for the next group. One request a second is a negligible load for a store."""


class StreamFeed:
    """This shard's groups of a stream job. It reads them from storage when they are submitted, and publishes them when
    finished.
    """

    def __init__(self, context: RunContext, stream: TaskStream) -> None:
        self._context = context
        self._record = StreamRecord(context.record.store)
        self._most = asyncio.Semaphore(max(1, stream.max_in_flight // context.shard.count))
        self._feed = Feed(self._record, context.shard.index)
        self.total: int | None = None
        """Total rollouts of this shard, once the stream is closed."""

    async def groups(self) -> AsyncIterator[tuple[int, Task]]:
        """Yield the shard's groups by number until the stream is closed and all are published."""
        shard = self._context.shard
        await self._feed.open()
        number, pause = shard.index, SHORTEST_POLL_SECONDS
        while True:
            entry = await self._record.entry(number)
            if entry is None:
                closed = await self._record.closed()
                if closed is not None and number >= closed:
                    self.total = shard.groups(closed) * self._context.job.spec.group_size
                    return
                await asyncio.sleep(pause)
                pause = min(LONGEST_POLL_SECONDS, pause * 2)
                continue
            await self._most.acquire()
            self._context.batches[number] = entry.label
            yield number, entry.task
            number, pause = number + shard.count, SHORTEST_POLL_SECONDS

    async def group_finished(self, group: int, task: Task, results: Sequence[Result]) -> None:
        """Publish a group unless an earlier process has."""
        await self._feed.publish(group, results)
        self._most.release()


ABORT_POLL_SECONDS = 5.0
"""Interval between checks whether another shard's runner aborted the job."""


async def run_job(
    job: RolloutJob,
    *,
    base_dir: Path,
    environ: Mapping[str, str],
    provider: Provider | SandboxProvider | None = None,
    model: Model | ModelSpec | None = None,
    new: bool = False,
    observer: Observer = lambda event: None,
    stop: asyncio.Event | None = None,
    shard: Shard = WHOLE_JOB,
    drain: Drain | None = None,
    plugins: Sequence[object] = (),
    agent: Callable[[], Agent] | None = None,
    tools: Mapping[str, Tool] = MappingProxyType({}),
    private: Sequence[Path] = (),
    command: str | None = None,
) -> JobSummary:
    """Run a job, or one shard of it, to its end, or resume it.

    Relative paths of the manifest start at `base_dir`. `model`, and a SandboxProvider as `provider`, replace those of
    the manifest; so do agents from `agent`, and `tools` by their names in `agent.tools`, in this process only.
    `plugins` are called after the manifest's. All checks run before the first rollout: tasks, tools, agent, plugins,
    model, storage. Raises the errors of those parts. Setting `stop` ends the run at once, requesting a `drain` ends it
    after the running turns; both leave the rest resumable. Workspaces on this machine cannot see the files and folders
    in `private`. `command` is the shell command that resumes the run, for its record.
    """
    origins: Sequence[Origin] = ()
    if job.spec.tasks.branch is not None:
        store = Store.open(output_uri(job, base_dir), environ)
        standing = None if new else await existing_run(store, job)
        origins = await find_origins(job, base_dir, environ, standing)
        loaded = LoadedTasks([origin.task for origin in origins])
    else:
        loaded = LoadedTasks([]) if job.spec.tasks.stream else load_tasks(job.spec.tasks, base_dir, environ)
    stop = stop or asyncio.Event()
    run_environment = RunEnvironment(
        base_dir, environ, provider, model, shard, drain or Drain(), plugins, agent, tools, private, command
    )
    health = Health()

    def observe(event: Event) -> None:
        health.observe(event)
        observer(event)

    async with (
        open_run(job, loaded.tasks, run_environment, new=new, observer=observe, origins=origins) as context,
        health.written(context.record.store, shard.index),
    ):
        health.watch(context.provider)
        return await _run(context, loaded, stop)


async def _run(context: RunContext, loaded: LoadedTasks, stop: asyncio.Event) -> JobSummary:
    job, record, tasks = context.job, context.record, loaded.tasks
    stream = None if job.spec.tasks.stream is None else StreamFeed(context, job.spec.tasks.stream)
    total = None if stream else context.shard.groups(len(tasks)) * job.spec.group_size
    context.observer(
        JobStarted(
            name=job.metadata.name,
            folder=record.folder,
            uri=record.store.uri,
            total=total,
            sealed=len(context.results),
            resumed=bool(context.begun or context.results),
            warnings=(*map(str, [*loaded.warnings, *about_services(job, tasks)]), *context.plugins.warnings),
            isolation=tuple(context.provider.warnings),
            results=context.results.values(),
        )
    )
    groups = Groups(context, _ignore_finished_group if stream is None else stream.group_finished)
    aborted = await abort_message(context.record.store)
    if aborted is None:
        aborted = await _work(context, groups, stream.groups() if stream else _listed(tasks), stop)
    if stream is not None:
        total = stream.total
    # An earlier process may have stopped after the last seal but before the last group was published.
    context.finished = aborted is not None or groups.published * job.spec.group_size == total
    return await _summary(context, total, aborted)


async def _work(
    context: RunContext, groups: Groups, source: AsyncIterator[tuple[int, Task]], stop: asyncio.Event
) -> str | None:
    """Run all groups until they are finished, or `stop` or a drain ends it; return why the job was aborted, or None."""
    work = asyncio.create_task(_all_groups(context, groups, source))
    aborting = asyncio.create_task(_aborted_by_another(context))
    stopping = [asyncio.create_task(stop.wait()), asyncio.create_task(groups.wait_until_drained()), aborting]
    try:
        await asyncio.wait({work, *stopping}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        elif aborting.done():
            return aborting.result()
    except JobAborted as error:
        return str(error)
    finally:
        for task in (work, *stopping):
            task.cancel()
        await asyncio.gather(work, *stopping, return_exceptions=True)
        await groups.stop()
    return None


async def _listed(tasks: Sequence[Task]) -> AsyncIterator[tuple[int, Task]]:
    for numbered in enumerate(tasks):
        yield numbered


async def _all_groups(context: RunContext, groups: Groups, source: AsyncIterator[tuple[int, Task]]) -> None:
    async for number, task in source:
        if context.shard.has(number):
            await groups.start(number, task)
    await groups.drain()


async def _aborted_by_another(context: RunContext) -> str:
    """Return, once it happens, why another shard's runner aborted the job. Never returns with a single shard."""
    while True:
        await asyncio.sleep(ABORT_POLL_SECONDS)
        if context.shard.count > 1 and (aborted := await abort_message(context.record.store)) is not None:
            return aborted


async def _ignore_finished_group(group: int, task: Task, results: Sequence[Result]) -> None:
    """Do nothing: only a stream publishes its groups."""


async def _summary(context: RunContext, total: int | None, aborted: str | None) -> JobSummary:
    record, results = context.record, context.results
    stats = await write_results(context, aborted) if context.finished else None
    outcomes = results.outcomes
    summary = JobSummary(
        name=context.job.metadata.name,
        folder=record.folder,
        uri=record.store.uri,
        total=len(results) if total is None else total,
        outcomes={outcome.value: outcomes[outcome] for outcome in Outcome},
        mean_reward=results.mean_reward,
        completed=context.finished and aborted is None,
        aborted=aborted,
        resumable=not context.finished,
        stats=stats or {},
        tracebacks=dict(Counter(result.traceback for result in results.values() if result.traceback).most_common()),
    )
    context.observer(JobEnded(summary))
    return summary
