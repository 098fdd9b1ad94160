"""Gradings whose workspace cannot be acquired are not repeated forever."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from agent_runtime.engine.attempt.grading import GradingLost, grade_artifacts
from agent_runtime.sandboxes.base import (
    SANDBOX_MEMORY,
    Fence,
    SandboxFailure,
    SandboxProvider,
    Workspace,
    WorkspaceSpec,
)
from rollout_api.rollout_job import Attempts, Verifier
from rollout_api.tasks import Task


class CrowdedProvider:
    """Has no memory for any workspace, also in a sandbox of its own."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        """For each request, whether the workspace should be alone."""

    async def acquire(self, spec: WorkspaceSpec, **how: Any) -> Workspace:
        self.asked.append(spec.alone)
        await asyncio.sleep(0)
        raise SandboxFailure(SANDBOX_MEMORY, "the sandbox's memory is used up")


async def no_artifacts() -> AsyncIterator[bytes]:
    yield b""


async def test_grading_without_memory_in_a_sandbox_of_its_own_uses_up_its_attempts() -> None:
    provider = CrowdedProvider()
    grading = grade_artifacts(
        Task.model_validate({"name": "t", "prompt": "p", "verifier": {"commands": ["true"]}}),
        Verifier(),
        cast(SandboxProvider, provider),
        WorkspaceSpec(group="g", working_dir="/w"),
        attempt="0-0",
        fence=Fence(1, "me"),
        artifacts=no_artifacts,
        attempts=Attempts.model_validate({"limit": 2, "backoffSeconds": 1}),
        jitter=random.Random(29),
    )
    with pytest.raises(GradingLost, match="the sandbox's memory is used up"):
        await asyncio.wait_for(grading, 20)
    assert provider.asked == [False, True, True]
