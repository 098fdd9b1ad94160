"""A stand-in for vLLM, models on it, and whole jobs against it."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.run import run_job
from agent_runtime.models.base import ModelRequest
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.model import Sampling
from rollout_api.rollout_job import RolloutJob
from tests.support.dummy_sandboxes import DummyProvider
from tests.support.model_requests import model_request
from tests.support.vllm_server import VllmStandIn

worlds = itertools.count()
Connect = Callable[..., Awaitable[InferenceClient]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens a model on a stand-in and, unless told not to, checks it; closes it at the end."""
    opened: list[InferenceClient] = []

    async def open_one(
        server: VllmStandIn, *, check: bool = True, seconds: float = 20, **changes: Any
    ) -> InferenceClient:
        settings: dict[str, Any] = {"headers": {}, "key_origin": "", "call_seconds": seconds}
        base_url, name = changes.pop("base_url", f"{server.url}/v1"), changes.pop("name", "policy")
        model = InferenceClient(base_url, name, **settings | changes)
        opened.append(model)
        if check:
            await model.check()
        return model

    yield open_one
    for model in opened:
        await model.close()


@pytest.fixture
def make_request() -> Callable[..., ModelRequest]:
    return partial(model_request, sampling=Sampling(max_tokens=200))


@dataclass
class Ran:
    """A run, and its record of rollout 0."""

    run: RunReader
    result: dict[str, Any]


async def run(server: VllmStandIn, folder: Path, **spec: Any) -> Ran:
    """Run a job of one rollout, whose tools use an in-memory provider."""
    model = spec.pop("model", {})
    job = RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "exact"},
            "spec": {
                "mode": "Train",
                "groupSize": 1,
                "tasks": {"inline": [{"name": "t", "prompt": "Count.", "verifier": {"commands": ["grade"]}}]},
                "model": {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy", "callSeconds": 20}} | model,
                "sampling": {"maxTokens": 400},
                "agent": {"tools": ["bash", "finish"], "maxTurns": 200},
                "attempts": {"limit": 1, "backoffSeconds": 0},
                "output": {"uri": str(folder)},
                **spec,
            },
        }
    )
    provider = DummyProvider(f"token-exact-{next(worlds)}")
    summary = await run_job(job, base_dir=folder, environ={}, provider=provider)
    reader = await open_run(Store.open(str(folder), {}), summary.folder)
    return Ran(reader, reader.results()[0].wire())


@pytest.fixture
def run_one() -> Callable[..., Awaitable[Ran]]:
    return run
