"""What a model server still generates for a cancelled job: how long, and how many tokens are wasted."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp

from agent_runtime.engine.run import run_job
from benchmarks.instant_model import server_process
from benchmarks.jobs import inline_tasks, rollout_job
from benchmarks.measuring import quantile
from benchmarks.report import Row, Target
from tests.support.dummy_sandboxes import DummyProvider

MODEL = "policy"
ROLLOUTS = 64  # concurrent; one vLLM server batches as many for one runner
TOKENS_PER_SECOND = 20.0  # of each rollout, as of a large model with that batch
ABORT_SECONDS = 1 / TOKENS_PER_SECOND  # an engine first completes its current step, with one token of each call
RUN_SECONDS = 12.0  # until the job is cancelled; no answer is complete by then
ANSWER_TOKENS = 2000
MOST_ORPHANS = 0.01
POLL_SECONDS = 0.1
LONGEST_SECONDS = 60.0  # time limit until all calls run, and until none runs any more


def measure() -> list[Row]:
    """Return the seconds until the last token, and the share of wasted tokens."""
    with _vllm() as url:
        return asyncio.run(_measure(url))


async def _measure(url: str) -> list[Row]:
    stop = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        async with aiohttp.ClientSession(url) as client:
            running = asyncio.ensure_future(
                run_job(
                    rollout_job(
                        folder,
                        tasks=inline_tasks(ROLLOUTS),
                        model={"endpoint": {"baseURL": f"{url}/v1", "name": MODEL}},
                        concurrency=ROLLOUTS,
                        mode="Train",
                        sampling={"maxTokens": ANSWER_TOKENS, "extra": {"min_tokens": ANSWER_TOKENS}},
                    ),
                    base_dir=Path("/"),
                    environ=os.environ,
                    provider=DummyProvider("benchmark"),
                    stop=stop,
                )
            )
            await _until(client, lambda running: running == ROLLOUTS)
            await asyncio.sleep(RUN_SECONDS)
            before = (await _get(client, "state"))["tokens"]
            cancelled = time.time()
            stop.set()
            await _until(client, lambda running: running == 0)
            await asyncio.gather(running, return_exceptions=True)
            after = (await _get(client, "state"))["tokens"]
            served = await _get(client, "served")
    late = [max(0.0, request["last_token"] - cancelled) for request in served if request["aborted"]]
    return [
        Row(f"a cancelled job of {ROLLOUTS} calls: until its last token, p99", quantile(late, 0.99) * 1e3, "ms"),
        Row(
            f"tokens made after a cancellation, of all of a run of {RUN_SECONDS:g} s",
            (after - before) / after * 100,
            "%",
            f"{after - before} of {after} tokens",
            target=Target("at most", MOST_ORPHANS * 100),
        ),
    ]


async def _until(client: aiohttp.ClientSession, reached: Callable[[int], bool]) -> None:
    """Wait until `reached` is true for the number of running requests at the server. Raises TimeoutError."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while not reached((await _get(client, "state"))["running"]):  # noqa: ASYNC110 the state is in another process
            await asyncio.sleep(POLL_SECONDS)


async def _get(client: aiohttp.ClientSession, what: str) -> Any:
    async with client.get(f"/_standin/{what}") as reply:
        return await reply.json()


def _vllm() -> AbstractContextManager[str]:
    rate = str(TOKENS_PER_SECOND)
    options = ["--port", "0", "--print-url", "--served-model-name", MODEL, "--tokens-per-second", rate]
    options += ["--abort-seconds", str(ABORT_SECONDS)]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return server_process("tests.support.vllm_server", options)
