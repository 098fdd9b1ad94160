"""SGLang itself on the CPU, and its stand-in: both are started by the same command line, and tested alike.

The tests of calls and of policy updates are those of vLLM (`tests/integration/vllm`).
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollout_api.inference.sglang import SGLANG
from tests.integration.vllm.conftest import (  # noqa: F401 two are fixtures
    MAX_NUM_SEQS,
    MODEL,
    REPOSITORY,
    TOKENS_PER_SECOND,
    WITHOUT_GPU,
    InferenceServer,
    model,
    recorder,
    serving,
)
from tests.integration.vllm.operated import Operated
from tests.support.ports import free_port
from tests.support.tiny_llama import MAX_MODEL_LEN

FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--context-length", str(MAX_MODEL_LEN)),
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "xgrammar", "--max-total-tokens", "65536", "--max-running-requests", str(MAX_NUM_SEQS)),
    *("--decode-log-interval", "1", "--tool-call-parser", "hermes", "--skip-server-warmup"),
    # As the operator passes them.
    *("--enable-metrics", "--enable-cache-report", "--incremental-streaming-output", "--enable-priority-scheduling"),
    *("--schedule-low-priority-values-first", "--disable-priority-preemption", "--default-priority-value", "0"),
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "HF_HUB_OFFLINE": "1",
    "STANDIN_ARGS": f"--tokens-per-second {TOKENS_PER_SECOND}",
}


class SglangServer(InferenceServer):
    """A server of the tiny model."""

    running_metric: ClassVar = "sglang:num_running_reqs"

    @property
    def long_answer(self) -> int:
        """See InferenceServer. Plain torch samples a few tokens a second on a busy machine."""
        return 200 if self.real else 1500

    async def render(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        answer = await self.post("/tokenize", {"model": MODEL, "messages": list(messages), **fields})
        return {"token_ids": answer["tokens"]}

    async def generate(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "ignore_eos": True, **fields.pop("sampling", {})}
        answer = await self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **fields})
        assert isinstance(answer, dict)
        return answer

    async def greedy(self, ids: list[int], count: int = 16) -> list[int]:
        return list((await self.generate(ids, sampling={"max_new_tokens": count}))["output_ids"])

    async def load(self, path: str | None) -> tuple[int, Any]:
        assert path is not None
        return await self.do(SGLANG.updates.reload(path, 60))


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The Python of an environment with SGLang."""
    done = subprocess.run([REPOSITORY / "hack/sglang-environment"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


BOTH = ["stand-in", pytest.param("SGLang", marks=pytest.mark.full)]
"""Both servers, as parameters of a fixture."""


@pytest.fixture(scope="session", params=BOTH)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with started_with((), request, tmp_path_factory) as server:
        yield server


@contextmanager
def started_with(
    flags: Sequence[str], request: pytest.FixtureRequest, folders: pytest.TempPathFactory, *, experts: bool = False
) -> Iterator[SglangServer]:
    """Start SGLang or its stand-in, as the fixture's parameter says, with further flags, and what SGLang needs
    for them without a GPU. `experts`: with a mixture of experts.
    """
    real = request.param == "SGLang"
    folder = folders.mktemp(request.param)
    if real:
        python: Path = request.getfixturevalue("sglang_python")
        for version in range(3):
            make = [str(python), "-m", "tests.support.tiny_llama", str(folder), str(version)]
            subprocess.run(make, cwd=REPOSITORY, check=True)
        program = [str(python), "-m", "sglang.launch_server"]
    else:
        for version in range(3):
            for weights in (folder / str(version), folder / f"adapter-{version}", folder / f"experts-{version}"):
                weights.mkdir()
                (weights / "version.json").write_text(json.dumps({"version": version}))
        program = [sys.executable, "-m", "tests.support.sglang_server"]
    port = free_port()
    server = SglangServer(real, f"http://127.0.0.1:{port}", folder, SGLANG, log=folder / "log", experts=experts)
    command = [*program, "--model-path", server.checkpoint(0), *FLAGS, *flags, "--port", str(port)]
    environment = ENVIRONMENT | ({"PYTHONPATH": str(WITHOUT_GPU)} if real and flags else {})
    with serving(server, command, environment):
        yield server


@pytest.fixture
async def server(started: SglangServer) -> SglangServer:
    """The server, not paused, with the weights of version 0 and an empty cache."""
    await started.resume()
    await started.pause()
    status, answer = await started.load(started.checkpoint(0))
    assert status == 200, answer
    await started.name_weights("0")
    await started.resume()
    await started.set_speed(TOKENS_PER_SECOND)
    if not started.real:
        await started.post("/_standin/script", {})
    return started


@pytest.fixture
async def served(server: SglangServer, tmp_path: Path) -> AsyncIterator[Operated]:
    """A ModelServer of the server."""
    async with Operated(server, tmp_path) as served:
        yield served
