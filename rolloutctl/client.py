"""The Python client: runs jobs in the calling process, with the engine of `rolloutctl run`.

    async for group in Client().run("job.yaml"):
        train_on(group.results)

A session takes tasks while training proceeds, and keeps sandboxes and connections across steps:

    async with Client().session("stream.yaml") as session:
        await session.submit(task)
        async for group in session:
            ...
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_runtime.engine.events import Event, GroupFinished
from agent_runtime.engine.run import run_job
from agent_runtime.engine.session import FinishedGroup, RolloutSession
from agent_runtime.models.base import Model
from agent_runtime.recording.job_record import output_uri
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import SandboxProvider
from rollout_api.manifest import load_manifest
from rollout_api.model import ModelSpec
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Provider
from rollout_api.tasks import Task
from rolloutctl.manifest import use_modules_in
from rolloutctl.sources import stored_tasks
from rolloutctl.trajectories import Trajectory, read_trajectory

__all__ = ["Client", "FinishedGroup", "GroupFinished", "RolloutSession", "RunAborted", "Trajectory"]


class RunAborted(Exception):
    """The run ended early because too many rollouts were lost to infrastructure. Finished rollouts are recorded."""


class Client:
    """Runs jobs in this process.

    A job is a RolloutJob or the path of its manifest. Relative paths in it start at the manifest's folder, or for a
    RolloutJob at the working directory. `provider` and `model` override the manifest: a trainer that used another model
    gives it when it opens its session again, because rollouts in flight continue at once. API keys and storage credentials
    are read from environment variables. `plugins` (objects or classes) are called after the manifest's.
    """

    def __init__(
        self,
        *,
        provider: Provider | SandboxProvider | None = None,
        model: Model | ModelSpec | None = None,
        plugins: Sequence[object] = (),
    ) -> None:
        self._settings: Any = {"provider": provider, "model": model, "plugins": plugins}

    async def run(
        self,
        job: RolloutJob | str | Path,
        *,
        tasks: Iterable[Task | Mapping[str, Any]] | None = None,
        new: bool = False,
    ) -> AsyncGenerator[GroupFinished, None]:
        """Yield each group of a job when all its members have a result. A resumed run yields its earlier groups first.

        `tasks` replace the manifest's: a finite iterable of Tasks, or of mappings with their fields. They are stored below
        the job's output, so that the run can be resumed and read like any other.

        Leaving the loop early stops the run, which can then be resumed. Raises RunAborted, and the errors of manifest,
        tasks, model, storage and sandboxes.
        """
        finished: asyncio.Queue[GroupFinished | None] = asyncio.Queue()
        stop = asyncio.Event()

        def observe(event: Event) -> None:
            if isinstance(event, GroupFinished):
                finished.put_nowait(event)

        loaded, base_dir, private = _load(job)
        if tasks is not None:
            loaded = await stored_tasks(loaded, tasks, Store.open(output_uri(loaded, base_dir), os.environ))
        work = asyncio.create_task(
            run_job(
                loaded,
                base_dir=base_dir,
                environ=os.environ,
                private=private,
                new=new,
                observer=observe,
                stop=stop,
                **self._settings,
            )
        )
        work.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (group := await finished.get()) is not None:
                yield group
            summary = work.result()
            if summary.aborted is not None:
                raise RunAborted(summary.aborted)
        finally:
            stop.set()
            await asyncio.gather(work, return_exceptions=True)

    async def trajectories(self, job: RolloutJob | str | Path) -> AsyncGenerator[Trajectory, None]:
        """Yield the sealed rollouts of a job's newest run as lists of steps, by index. Raises NoSuchRun, RecordCorrupt."""
        loaded, base_dir, _ = _load(job)
        run = await open_run(Store.open(output_uri(loaded, base_dir), os.environ), loaded.metadata.name)
        for index in run.seals:
            yield await read_trajectory(run, index)

    def session(self, job: RolloutJob | str | Path, *, new: bool = False) -> RolloutSession:
        """Open a run of a job with `tasks: {stream: {maxInFlight: N}}`, as an async context manager.

        `submit` submits a task, iteration returns finished groups, `use_model` sets the next policy, and `close` ends the
        submission. A later session of a job with the same name continues unfinished work.
        """
        loaded, base_dir, private = _load(job)
        return RolloutSession(loaded, base_dir=base_dir, private=private, new=new, **self._settings)


def _load(job: RolloutJob | str | Path) -> tuple[RolloutJob, Path, list[Path]]:
    """Return the job, the folder of its relative paths, and its file in a list (empty for a RolloutJob)."""
    if isinstance(job, RolloutJob):
        return job, Path.cwd(), []
    path = Path(job).resolve()
    loaded = load_manifest(path)
    use_modules_in(path.parent)
    return loaded, path.parent, [path]
