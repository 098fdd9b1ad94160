"""The cluster provider with real executors, and a stand-in for API server and operator."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio import client

from agent_runtime.kube.api import KubeApi
from agent_runtime.recording.memory_use import MemoryUse
from agent_runtime.sandboxes.base import Fence, SandboxProvider, WorkspaceSpec
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from rollout_api.files import TaskFile
from rollout_api.rollout_job import RolloutJob
from tests.integration.cluster_provider.stand_in_api import NAMESPACE
from tests.integration.cluster_provider.stand_in_operator import KEY, StandInOperator
from tests.integration.sandboxes.conftest import Case

FIRST, SECOND = Fence(1, "first"), Fence(2, "second")


def rollout_job(mode: str = "Overlay", *, places: int = 4, group_size: int = 4, **changes: Any) -> RolloutJob:
    """Return a job as a runner reads it."""
    sandbox = {
        "image": "task",
        "workspaces": {"mode": mode, "perSandbox": places},
        "startSeconds": 90,
        "idleSeconds": 120,
    }
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "sums", "namespace": NAMESPACE, "uid": "0b5e"},
            "spec": {
                "groupSize": group_size,
                "tasks": {"inline": [{"name": "one", "prompt": "add"}]},
                "agent": {"type": "Nop"},
                "sandbox": {**sandbox, **changes},
                "runners": {"concurrency": 16},
                "output": {"uri": "s3://bucket/x"},
            },
        }
    )


def spec(group: str = "g0", **changes: Any) -> WorkspaceSpec:
    """Return a small task: one file, and a setup command that writes one line."""
    defaults: dict[str, Any] = {
        "group": group,
        "image": "task",
        "working_dir": "/workspace",
        "files": [TaskFile(path="given.txt", content="given\n")],
        "setup": ["echo prepared >> setup.log"],
        "setup_seconds": 30,
        "start_seconds": 90,
    }
    return WorkspaceSpec(**{**defaults, **changes})


@pytest.fixture
async def operator() -> AsyncIterator[StandInOperator]:
    """A running stand-in for API server and operator."""
    stand_in = StandInOperator()
    await stand_in.api.start()
    yield stand_in
    await stand_in.close()


@pytest.fixture(params=["Overlay", "Plain"])
async def case(request: pytest.FixtureRequest, operator: StandInOperator) -> AsyncIterator[Case]:
    """The cluster provider as a case of the tests that all providers share."""
    api = KubeApi(client.Configuration(host=f"http://127.0.0.1:{operator.api.port}"), NAMESPACE)

    def provider(places: int = 8) -> ClusterProvider:
        return ClusterProvider(rollout_job(request.param, places=places), 0, KEY, api)

    yield Case(request.param, provider)
    await api.close()


@pytest.fixture
async def provider(case: Case) -> AsyncIterator[SandboxProvider]:
    """An open provider."""
    one = case.provider()
    await one.open()
    yield one
    await one.close()


Opened = Callable[..., Awaitable[ClusterProvider]]


@pytest.fixture
async def opened(operator: StandInOperator) -> AsyncIterator[Opened]:
    """Open a provider, as each process of a runner does."""
    providers: list[tuple[ClusterProvider, KubeApi]] = []

    async def open_one(
        job: RolloutJob | None = None, *, runner: int = 0, memory: MemoryUse | None = None
    ) -> ClusterProvider:
        api = KubeApi(client.Configuration(host=f"http://127.0.0.1:{operator.api.port}"), NAMESPACE)
        provider = ClusterProvider(job or rollout_job(), runner, KEY, api, memory=memory)
        providers.append((provider, api))
        await provider.open()
        return provider

    yield open_one
    for provider, api in providers:
        await provider.close(keep=True)
        await api.close()


async def acquire(
    provider: ClusterProvider, attempt: str = "0-0", group: str = "g0", name: str = "agent", **changes: Any
) -> ExecutorWorkspace:
    return await provider.acquire(spec(group, **changes), attempt=attempt, fence=FIRST, name=name)


async def say(workspace: ExecutorWorkspace, command: str, key: str = "1:say") -> str:
    return (await workspace.run(command, key=key, deadline_seconds=60)).stdout.decode().strip()


async def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until the condition holds; fail after this many seconds."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 (the condition is whatever a test says)
            await asyncio.sleep(0.02)
