"""Training on one machine: `python -m examples.train.laptop`. The policy's server is a separate process."""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from agent_rollouts.client import Client
from agent_rollouts.tasks import RolloutJob, load_manifest
from examples.train import lake, policy
from examples.train.trainer import Settings, Trainer, WrongPolicy

JOB = Path(__file__).with_name("job.yaml")


class LaptopServer:
    """A policy server that gets new weights through vLLM's HTTP routes, from `folder`."""

    def __init__(self, url: str, folder: Path, http: aiohttp.ClientSession) -> None:
        self._url, self._folder, self._http = url, folder, http

    async def update(self, version: int, weights: Any) -> None:
        """See PolicyServer. Pauses the server, loads the weights, sets their version, resumes and verifies. Raises
        WrongPolicy, aiohttp.ClientError.
        """
        folder = self._folder / f"policy-{version}"
        self.save(weights, folder)
        await self._post("/pause?mode=keep")
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self._post("/update_weight_version", {"new_version": str(version)})
        await self._post("/resume")
        self.verify(version, weights, (await self._post("/weight_checker", {"action": "checksum"}))["checksums"])

    def save(self, weights: Any, folder: Path) -> None:
        policy.save(weights, folder)

    def verify(self, version: int, weights: Any, checksums: Mapping[str, str]) -> None:
        if checksums != {"table": policy.checksum(weights)}:
            raise WrongPolicy(
                f"{self._url} was given policy {version}, but its weights have other checksums: {checksums}"
            )

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._http.post(self._url + path, json=body or {}) as response:
            response.raise_for_status()
            return await response.json()


@contextlib.asynccontextmanager
async def server_process() -> AsyncIterator[str]:
    command = (sys.executable, "-m", "examples.train.server")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


def job_for(url: str, output: Path, seed: int) -> RolloutJob:
    job = load_manifest(JOB.read_text().replace("MODEL_URL", url))
    spec = {"seed": seed, "output": job.spec.output.model_copy(update={"uri": str(output)})}
    return job.model_copy(update={"spec": job.spec.model_copy(update=spec)})


async def learn(
    url: str,
    output: Path,
    settings: Settings,
    seed: int,
    trainer: Callable[..., Trainer] = Trainer,
    server: type[LaptopServer] = LaptopServer,
) -> list[float]:
    """Train the policy; return the learning curve. The rollouts are recorded in `output`. Raises WrongPolicy."""
    job = job_for(url, output, seed)
    with tempfile.TemporaryDirectory(prefix="policy-") as folder:
        async with aiohttp.ClientSession() as http, Client().session(job, new=True) as session:
            curve = await trainer(session, aiter(session), server(url, Path(folder), http), settings).run(print_share)
            await session.close()
            return curve


def print_share(number: int, share: float) -> None:
    print(f"update {number:2}: {share:6.1%} reach the goal", flush=True)


async def _main(options: argparse.Namespace) -> None:
    best = lake.best_possible(slippery=options.slippery)
    print(f"best possible: {best:.1%}; at random: {lake.at_random(slippery=options.slippery):.1%}")
    settings = Settings(slippery=options.slippery, updates=options.updates, learning_rate=options.learning_rate)
    async with server_process() as url:
        await learn(url, options.output, settings, options.seed)
    print(f"`rolloutctl report {options.output}` shows the learning curve")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.train.laptop", description=__doc__)
    parser.add_argument("--slippery", action="store_true", help="slippery ice: two of three steps go sideways")
    parser.add_argument("--updates", type=int, default=Settings.updates)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the recorded run (default: out)")
    asyncio.run(_main(parser.parse_args()))
