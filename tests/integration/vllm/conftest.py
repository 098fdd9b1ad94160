"""vLLM itself on the CPU, and its stand-in: both are started by the same command line, and tested alike."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest

from agent_runtime.models.inference_client import InferenceClient
from rollout_api.inference.description import Description, Request
from rollout_api.inference.vllm import VLLM
from rollout_api.model import RoutedExperts
from tests.integration.vllm.recorder import Recorder
from tests.support.ports import free_port
from tests.support.tiny_llama import MAX_MODEL_LEN
from tests.support.vllm_environment import installed_vllm_python, write_tiny_llama

REPOSITORY = Path(__file__).parents[3]
WITHOUT_GPU = REPOSITORY / "tests/support/without_gpu"
MODEL = "policy"
MAX_NUM_SEQS = 8
"""A small number, so that requests wait and priorities have an effect."""
PLAIN_FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--enforce-eager", "--dtype", "float32", "--max-num-seqs", str(MAX_NUM_SEQS)),
)
FLAGS = (
    *PLAIN_FLAGS,
    *("--enable-scale-out", "--enable-prompt-tokens-details", "--scheduling-policy", "priority"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-lora", "--max-lora-rank", "8"),
    # On a CPU, vLLM applies the adapter in the last slot to calls without one (0.32,
    # vllm/lora/ops/torch_ops/lora_ops.py indexes with -1), so tests never fill that slot.
    *("--max-loras", "8"),
)
TOKENS_PER_SECOND = 200
"""Speed of the stand-in at the start of each test: slow enough that a long answer runs while a test does something."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "STANDIN_ARGS": f"--tokens-per-second {TOKENS_PER_SECOND} --weight-versions",
}
START_SECONDS = 900.0
"""Time limit on a busy machine; the real vLLM imports torch."""
ASK_SECONDS = 120.0


@dataclass
class InferenceServer:
    """A server of the tiny model, and the folders of its versions."""

    real: bool
    url: str
    checkpoints: Path
    engine: Description = VLLM
    first_label: Any = None
    """Name of its weights before one was set."""
    log: Path = Path(os.devnull)
    experts: bool = False
    """Whether its model is a mixture of experts."""
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    running_metric: ClassVar = "vllm:num_requests_running"

    @property
    def long_answer(self) -> int:
        """Tokens of an answer that an update interrupts."""
        return 1500

    async def start(self) -> None:
        """Start its process, and return when it serves."""
        with self.log.open("ab") as log:
            self.process = process = subprocess.Popen(  # noqa: ASYNC220, of which `kill` needs no event loop
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        async with asyncio.timeout(START_SECONDS):
            while True:
                assert process.poll() is None, self.log.read_text()[-5000:]
                try:
                    status, _ = await self.ask("GET", "/health", seconds=5)
                    if status == 200:
                        break
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.2)
        self.first_label = (await self.get(self.engine.updates.weights.path))["weight_version"]

    def kill(self) -> None:
        """End its processes at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def checkpoint(self, version: int) -> str:
        return str(self.checkpoints / (f"experts-{version}" if self.experts else str(version)))

    def adapter(self, version: int) -> str:
        return str(self.checkpoints / f"adapter-{version}")

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Send a request. Returns status and answer, parsed if it is JSON."""
        timeout = aiohttp.ClientTimeout(total=options.pop("seconds", ASK_SECONDS))
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.request(method, self.url + path, json=body, **options) as response,
        ):
            data = await response.read()
            try:
                return response.status, json.loads(data)
            except ValueError:
                return response.status, data.decode()

    async def set_speed(self, tokens_per_second: int) -> None:
        """Set the speed of the stand-in for all requests; vLLM itself has its own."""
        if not self.real:
            await self.post("/_standin/speed", {"tokens_per_second": tokens_per_second})

    async def do(self, request: Request) -> tuple[int, Any]:
        """Send a request of the server's description."""
        return await self.ask(request.method, request.path, request.body, params=request.query)

    async def pause(self) -> None:
        """Pause the engine as our operator does."""
        await self._succeed(self.engine.updates.pause)

    async def resume(self) -> None:
        await self._succeed(self.engine.updates.resume)

    async def name_weights(self, name: str) -> None:
        await self._succeed(self.engine.updates.name_weights(name))

    async def running(self) -> float:
        """Return the number of requests that the server reports as running."""
        return await self.metric(self.running_metric)

    async def _succeed(self, request: Request) -> None:
        status, answer = await self.do(request)
        assert status == 200, answer

    async def get(self, path: str) -> Any:
        status, answer = await self.ask("GET", path)
        assert status == 200, answer
        return answer

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        status, answer = await self.ask("POST", path, body, **options)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Yield the events of a stream, which ends with `[DONE]`."""
        async with aiohttp.ClientSession() as client, client.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    return
                if text:
                    yield json.loads(text)

    async def render(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        answer = await self.post(
            "/v1/chat/completions/render", {"model": MODEL, "messages": list(messages), "logprobs": True, **fields}
        )
        assert isinstance(answer, dict)
        return answer

    async def generate(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        """Return the whole answer, with greedy sampling unless `sampling` sets another one."""
        sampling = {
            "temperature": 0.0,
            "max_tokens": 16,
            "logprobs": 0,
            "ignore_eos": True,
            **fields.pop("sampling", {}),
        }
        answer = await self.post(
            "/inference/v1/generate", {"model": MODEL, "token_ids": ids, "sampling_params": sampling, **fields}
        )
        assert isinstance(answer, dict)
        return answer

    async def greedy(self, ids: list[int], count: int = 16) -> list[int]:
        (choice,) = (await self.generate(ids, sampling={"max_tokens": count}))["choices"]
        return list(choice["token_ids"])

    async def load(self, path: str | None) -> tuple[int, Any]:
        """Load weights as our operator does; None: without a path."""
        body = {"method": "reload_weights", "kwargs": {} if path is None else {"weights_path": path}, "timeout": 60}
        return await self.ask("POST", "/collective_rpc", body)

    async def metric(self, name: str) -> float:
        """Return the sum over all labels."""
        text = await self.get("/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        values = [line.rsplit(" ", 1)[1] for line in lines if self.engine.metrics.totals in line]
        assert values, f"no {name} in /metrics"
        return sum(map(float, values))


BOTH = ["stand-in", pytest.param("vLLM", marks=pytest.mark.full)]
"""Both servers, as parameters of a fixture."""


@pytest.fixture(scope="session", params=BOTH)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with started_with(FLAGS, request.param, tmp_path_factory) as server:
        yield server


@contextmanager
def started_with(
    flags: Sequence[str],
    kind: str,
    folders: pytest.TempPathFactory,
    standin_arguments: str = "",
    *,
    experts: bool = False,
    push: bool = False,
) -> Iterator[InferenceServer]:
    """Start vLLM or its stand-in with these flags, and `standin_arguments`, which vLLM does not have. `experts`: with a
    mixture of experts, and what vLLM needs to report them without a GPU. `push`: with what it needs to receive weights.
    """
    real = kind == "vLLM"
    folder = folders.mktemp(kind)
    if real:
        for version in range(3):
            write_tiny_llama(folder, version)
        program = [str(installed_vllm_python().parent / "vllm"), "serve"]
    else:
        for version in range(3):
            for weights in (folder / str(version), folder / f"adapter-{version}", folder / f"experts-{version}"):
                weights.mkdir()
                (weights / "version.json").write_text(json.dumps({"version": version}))
        program = [sys.executable, "-m", "tests.support.vllm_server", "serve"]
    port = free_port()
    server = InferenceServer(real, f"http://127.0.0.1:{port}", folder, log=folder / "log", experts=experts)
    environment = ENVIRONMENT | {"STANDIN_ARGS": f"{ENVIRONMENT['STANDIN_ARGS']} {standin_arguments}"}
    if real and (experts or push):
        # Where vLLM finds Triton it chooses the second model runner, which Triton's interpreter makes slow.
        environment |= {"VLLM_USE_V2_MODEL_RUNNER": "1" if experts else "0", "PYTHONPATH": str(WITHOUT_GPU)}
    with serving(server, [*program, server.checkpoint(0), *flags, "--port", str(port)], environment):
        # The first answer of an engine may take longer than a client waits.
        first = server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}, seconds=START_SECONDS)
        asyncio.run(first)
        yield server


@contextmanager
def serving(server: InferenceServer, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Run the server's process. It serves when the context begins."""
    server.command, server.environment = command, environment
    try:
        asyncio.run(server.start())
        yield
    finally:
        server.kill()


@pytest.fixture
async def server(started: InferenceServer) -> InferenceServer:
    """The server, neither paused nor asleep, with the weights of version 0."""
    await started.resume()
    status, answer = await started.load(started.checkpoint(0))
    assert status == 200, answer
    await started.name_weights("0")
    await started.post("/reset_prefix_cache")
    await started.set_speed(TOKENS_PER_SECOND)
    if not started.real:
        await started.post("/_standin/script", {})
    return started


@pytest.fixture
async def recorder(server: InferenceServer) -> AsyncIterator[Recorder]:
    """A recorder in front of the server."""
    async with Recorder(server.url).serve() as recorder:
        yield recorder


@pytest.fixture
async def model(recorder: Recorder) -> AsyncIterator[InferenceClient]:
    """Our own client of the server, through the recorder."""
    async with client_of(recorder.url) as client:
        yield client


@asynccontextmanager
async def client_of(url: str, experts: RoutedExperts | None = None) -> AsyncIterator[InferenceClient]:
    """Our own client of a server, checked."""
    settings: dict[str, Any] = {"headers": {}, "key_origin": "", "call_seconds": ASK_SECONDS}
    client = InferenceClient(f"{url}/v1", MODEL, **settings, experts=experts)
    try:
        await client.check()
        yield client
    finally:
        await client.close()
