"""Time without a sampled token while a fleet of real vLLM servers gets new weights: our update with calls in flight, and
stopping and starting the servers with the new weights.

Both run the same servers (vLLM on the CPU, a Llama of 0.2 million parameters) and the same number of calls. So the figure
is what the steps of an update cost. Loading large weights takes its time in both.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from agent_runtime.models.base import CallHealth, ModelRequest
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.pool.fleet import CONFIRM_SECONDS, View
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.serving.gateway import serve
from agent_runtime.serving.policies import Policies
from benchmarks.conversation import ROOT
from benchmarks.report import Row, Target, comparison
from rollout_api.model import Sampling
from rollout_api.model_server import Gate
from tests.support.policy_updater import TOKEN, read_status, write
from tests.support.ports import free_ports
from tests.support.tiny_llama import MAX_MODEL_LEN
from tests.support.vllm_environment import installed_vllm_python, write_tiny_llama

MODEL = "policy"
RUNNER = "job/0"
SERVERS = 3
CALLS = 6  # at any time
TOKENS = 1000  # of an answer: several seconds, so that an update interrupts most calls
UPDATES = 3  # of which the median counts
STEADY_SECONDS = 5.0  # before an update and after it
LONGEST_SECONDS = 900.0  # until servers have started, or an update is over
POLL_SECONDS = 0.05
FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"),
    *("--dtype", "float32", "--max-num-seqs", str(CALLS), "--enable-scale-out", "--scheduling-policy", "priority"),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # One thread each, which does not spin: by default each server has a thread for each core, and three servers then
    # answer nothing for minutes.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def measure() -> list[Row]:
    """Return the longest time without a token around an update, ours and by a restart."""
    vllm = installed_vllm_python().parent / "vllm"
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        for version in range(UPDATES + 1):
            write_tiny_llama(Path(folder), version)
        return asyncio.run(_measure(vllm, Path(folder)))


async def _measure(vllm: Path, folder: Path) -> list[Row]:
    servers = _Servers(vllm, folder)
    try:
        await servers.start(0)
        ours, resent = await _updates(servers, folder)
        restart, lost = await _restart(servers)
    finally:
        await servers.stop()
    median = sorted(ours)[len(ours) // 2]
    what = f"{SERVERS} vLLM servers with {CALLS} calls get new weights: longest time without a token"
    return [
        comparison(what, median, "s", "stop and start", restart, Target("at least", 10), inverse=True),
        Row("calls that begin again", resent, "", f"stop and start {lost} of {CALLS}", target=Target("at most", 0)),
    ]


@dataclass
class _Servers:
    """vLLM processes."""

    vllm: Path
    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(SERVERS))
    processes: list[Process] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def checkpoint(self, version: int) -> Path:
        return self.folder / str(version)

    async def start(self, version: int) -> None:
        """Start all with a version's weights. Returns when all serve."""
        self.processes = []
        for port in self.ports:
            with (self.folder / f"log-{port}").open("wb") as log:
                command = (str(self.vllm), "serve", str(self.checkpoint(version)), *FLAGS, "--port", str(port))
                environment = os.environ | ENVIRONMENT
                self.processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
                    )
                )
        async with asyncio.timeout(LONGEST_SECONDS), aiohttp.ClientSession() as http:
            for url in self.urls:
                while not await _answers(http, f"{url}/health"):  # noqa: ASYNC110 the state is in another process
                    await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """Kill all, which is the fastest end: vLLM waits for its clients after SIGTERM."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in self.processes))


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


class _Fleet:
    """Gateways in front of the servers, the operator's decisions in a process of their own, and a runner's model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pods: list[dict[str, Any]] = []
        self._policy: dict[str, Any] = {"version": 0}
        self.model = ServedModel(MODEL, self, _connect, me=RUNNER, sample_seconds=0.2)

    async def open(self, stack: AsyncExitStack, servers: _Servers) -> None:
        (self._folder / "model").symlink_to(servers.checkpoint(0))
        for number, url in enumerate(servers.urls):
            name = f"s-{number}"
            policies = Policies(self._folder / name, lambda: os.environ)
            ports = await serve(stack, TOKEN, policies, url, 0, 0)
            data, control = (f"http://127.0.0.1:{port}" for port in ports)
            self._pods.append({"name": name, "uid": name, "restarts": 0, "url": data, "control": control, "up": True})
        self._tell()
        command = (sys.executable, "-m", "tests.support.policy_updater", str(self._folder))
        updater = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        stack.push_async_callback(updater.wait)
        stack.callback(updater.kill)
        stack.push_async_callback(self.model.close)
        await self.until(0)
        await self.model.check()

    async def update(self, version: int, weights: Path) -> None:
        """Return when the version is served."""
        self._policy = {"version": version, "uri": weights.as_uri()}
        self._tell()
        await self.until(version)

    async def until(self, version: int) -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                status = read_status(self._folder)
                ready = sum(server.ready for server in status.servers)
                policy = status.policy
                if (policy.current, policy.gate, policy.step, ready) == (version, Gate.OPEN, None, SERVERS):
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def changes(self) -> AsyncIterator[View]:
        """See Directory. The runner's acknowledgements are reported too."""
        loop = asyncio.get_running_loop()
        last, told, acknowledged = None, 0.0, None
        while True:
            if acknowledged != self.model.acknowledged:
                acknowledged = self.model.acknowledged
                self._tell()
            asked, status = loop.time(), read_status(self._folder)
            if status != last or asked - told > CONFIRM_SECONDS:
                last, told = status, asked
                yield View(status, asked)
            await asyncio.sleep(POLL_SECONDS)

    def _tell(self) -> None:
        fleet = {
            "policy": self._policy,
            "mode": "Pull",
            "hook": "",
            "minReady": (SERVERS + 1) // 2,
            "pods": self._pods,
            "runners": {RUNNER: self.model.acknowledged},
        }
        write(self._folder / "fleet.json", fleet)


def _connect(url: str) -> InferenceClient:
    return InferenceClient(f"{url}/v1", MODEL, headers={}, key_origin="", call_seconds=LONGEST_SECONDS)


async def _updates(servers: _Servers, folder: Path) -> tuple[list[float], int]:
    """Return the longest time without a token of each update, and the number of calls that were sent again."""
    times: list[float] = []
    gaps: list[float] = []
    async with AsyncExitStack() as stack:
        fleet = _Fleet(folder / "fleet")
        (folder / "fleet").mkdir()
        await fleet.open(stack, servers)
        calls = [asyncio.create_task(_call_for_ever(fleet.model, times, number)) for number in range(CALLS)]
        try:
            for version in range(1, UPDATES + 1):
                await asyncio.sleep(STEADY_SECONDS)
                begun = time.monotonic()
                await fleet.update(version, servers.checkpoint(version))
                await asyncio.sleep(STEADY_SECONDS)
                gaps.append(_longest_gap(times, begun))
        finally:
            _end(calls)
            await asyncio.gather(*calls, return_exceptions=True)
        return gaps, fleet.model.resent


async def _call_for_ever(model: ServedModel, times: list[float], number: int) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=TOKENS, extra={"ignore_eos": True})
    turn = 0
    while True:
        turn += 1
        message = {"role": "user", "content": f"Say what {number} times {turn} is."}
        await model.complete(
            ModelRequest(
                messages=[message],
                tools=[],
                sampling=sampling,
                seed=turn,
                session=f"{number}-{turn}",
                task="t",
                member=number,
                turn=0,
                health=CallHealth(on_tokens=lambda _: times.append(time.monotonic())),
            )
        )


async def _restart(servers: _Servers) -> tuple[float, int]:
    """Return the longest time without a token when the servers are stopped and started, and the calls that were lost."""
    times: list[float] = []
    lost = [0]
    calls = [
        asyncio.create_task(_stream_for_ever(servers.urls[number % SERVERS], times, lost)) for number in range(CALLS)
    ]
    try:
        await asyncio.sleep(STEADY_SECONDS)
        begun = time.monotonic()
        await servers.stop()
        broken = lost[0]
        await servers.start(1)
        await asyncio.sleep(STEADY_SECONDS)
        return _longest_gap(times, begun), broken
    finally:
        _end(calls)
        await asyncio.gather(*calls, return_exceptions=True)


async def _stream_for_ever(url: str, times: list[float], lost: list[int]) -> None:
    """Keep one streamed call at a server, and begin it again when it breaks."""
    body = {"model": MODEL, "prompt": "Say ok.", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LONGEST_SECONDS)) as http:
        while True:
            has_tokens, done = False, False
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{url}/v1/completions", json=body) as response:
                    async for line in response.content:
                        done = done or line.startswith(b"data: [DONE]")
                        if line.startswith(b"data: {"):
                            has_tokens = True
                            times.append(time.monotonic())
            lost[0] += has_tokens and not done
            if not done:
                await asyncio.sleep(POLL_SECONDS)


def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


def _longest_gap(times: list[float], begun: float) -> float:
    return max(after - before for before, after in _pairs(times, begun))


def _pairs(times: list[float], begun: float) -> Iterator[tuple[float, float]]:
    """Return the pairs of successive times from the last one before `begun` on."""
    first = max((number for number, at in enumerate(times) if at < begun), default=0)
    return pairwise(times[first:])
