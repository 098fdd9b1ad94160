"""`python -m agent_runtime.runner.engine`: the engine process of a runner pod, started by the supervisor."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

from agent_runtime.kube.api import KubeApi
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.recording.memory_use import STORAGE_SECONDS, MemoryUse
from agent_runtime.recording.store import StorageError, Store
from agent_runtime.runner.log import configure, log, write_termination_log
from agent_runtime.runner.metrics import RunnerMetrics, serve_metrics
from agent_runtime.runner.model_server import model_server_name, open_served_model
from agent_runtime.runner.report import ShardTally
from agent_runtime.runner.shard_run import ShardRun
from agent_runtime.runner.start import BadStart, Start, read_start
from agent_runtime.runner.supervisor import PROGRESS_FD, RESTARTS, Exit
from agent_runtime.sandboxes.base import SandboxProvider
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from rollout_api.cluster import RUNNER_FOLDER, RUNNER_METRICS_PORT
from rollout_api.sandbox import Provider

OpenProvider = Callable[[Start, KubeApi, RunnerMetrics], Provider | SandboxProvider]


def cluster_provider(start: Start, api: KubeApi, metrics: RunnerMetrics) -> SandboxProvider:
    memory = None
    with contextlib.suppress(StorageError):  # the run opens it too, and says what is wrong
        memory = MemoryUse(Store.open(start.job.spec.output.uri, os.environ, patience_seconds=STORAGE_SECONDS))
    provider = ClusterProvider(start.job, start.shard.index, start.key, api, memory=memory)
    provider.on_sandbox_started = metrics.sandbox_started
    metrics.watch_sandboxes(provider.sandbox_states)
    return provider


async def run_engine(
    folder: Path,
    environ: Mapping[str, str],
    *,
    open_provider: OpenProvider = cluster_provider,
    metrics_port: int = RUNNER_METRICS_PORT,
) -> Exit:
    """Run the shard given by `folder` and `environ`. Raises unexpected errors."""
    try:
        start = read_start(folder, environ)
    except BadStart as error:
        write_termination_log(str(error))
        return Exit.BAD_START
    assert start.job.metadata.namespace is not None  # read_start has looked
    api = await KubeApi.connect(start.job.metadata.namespace)
    tally = ShardTally(start.shard, start.job.spec.group_size)
    metrics = RunnerMetrics(tally, start.job.spec.agent.tools, int(environ.get(RESTARTS, "0")))

    async def open_model() -> ServedModel | None:
        name = model_server_name(start.job)
        return None if name is None else await open_served_model(start, name, api)

    run = ShardRun(
        start.job,
        start.shard,
        api=api,
        tally=tally,
        metrics=metrics,
        open_model=open_model,
        on_sealed=_progress_of(environ),
    )
    async with serve_metrics(metrics.exposition, metrics_port):
        return await run.run(open_provider(start, api, metrics), folder, environ)


def main(engine: Coroutine[Any, Any, Exit]) -> None:
    """Run the engine and end this process with its exit code."""
    configure(os.environ)
    try:
        asyncio.run(_run_and_exit(engine))
    except BaseException:  # noqa: BLE001 - also a SystemExit of an agent or a tool, which must count as a crash
        log.exception("the engine has crashed")
        _exit_now(Exit.CRASHED)


async def _run_and_exit(engine: Coroutine[Any, Any, Exit]) -> None:
    _exit_now(await engine)


def _exit_now(code: Exit) -> NoReturn:
    """Exit immediately: a normal exit waits for running threads, and those of the storage library may abort the
    process.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _progress_of(environ: Mapping[str, str]) -> Callable[[], None]:
    pipe = environ.get(PROGRESS_FD)
    if pipe is None:
        return lambda: None

    def notify() -> None:
        # The pipe is full, so the reader has enough notifications.
        with contextlib.suppress(BlockingIOError):
            os.write(int(pipe), b".")

    return notify


if __name__ == "__main__":
    main(run_engine(Path(RUNNER_FOLDER), os.environ))
