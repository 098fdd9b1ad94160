"""The policy of examples/train, its server, and open jobs that it answers."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from aiohttp import ClientSession

from agent_runtime.engine.session import RolloutSession
from examples.train.laptop import LaptopServer, job_for
from examples.train.server import Engine, serve
from examples.train.trainer import Settings, Trainer
from rolloutctl.client import Client


@contextlib.asynccontextmanager
async def opened(
    folder: Path, engine: Engine | None = None, settings: Settings | None = None, environments: Sequence[str] = ()
) -> AsyncIterator[tuple[Trainer, RolloutSession]]:
    """Open a trainer with an open job, which may also use these environments, and a server with that engine in this
    process.
    """
    runner = await serve(engine or Engine(None), "lake", "127.0.0.1", 0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        job = job_for(url, folder / "out", seed=0)
        tasks = job.spec.tasks.model_copy(update={"runner_environments": list(environments)})
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": tasks})})
        async with ClientSession() as http, Client().session(job, new=True) as session:
            server = LaptopServer(url, folder / "weights", http)
            yield Trainer(session, aiter(session), server, settings or Settings(groups=2, updates=2)), session
    finally:
        await runner.cleanup()
