"""Gradings whose workspace cannot be acquired are not repeated forever."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from agent_runtime.engine.attempt.grading import GradingLost, grade_artifacts
from agent_runtime.sandboxes.base import (
    SANDBOX_MEMORY,
    CommandResult,
    Fence,
    SandboxFailure,
    SandboxProvider,
    Workspace,
    WorkspaceSpec,
)
from rollout_api.records import Verdict
from rollout_api.rollout_job import Attempts, Verifier
from rollout_api.tasks import Task
from tests.support.dummy_sandboxes import DummyProvider, Files, ended


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
    yield bytes(1024)  # an empty tar


async def graded(provider: SandboxProvider, limit: int) -> Verdict:
    return await grade_artifacts(
        Task.model_validate({"name": "t", "prompt": "p", "verifier": {"commands": ["false"]}}),
        Verifier(),
        provider,
        WorkspaceSpec(group="g", working_dir="/w", network={"verifier": ["judge:443"]}),
        attempt="0-0",
        fence=Fence(1, "me"),
        artifacts=no_artifacts,
        attempts=Attempts.model_validate({"limit": limit, "backoffSeconds": 0.01}),
        jitter=random.Random(29),
    )


async def test_grading_without_memory_in_a_sandbox_of_its_own_uses_up_its_attempts() -> None:
    provider = CrowdedProvider()
    grading = graded(cast(SandboxProvider, provider), limit=2)
    with pytest.raises(GradingLost, match="the sandbox's memory is used up"):
        await asyncio.wait_for(grading, 20)
    assert provider.asked == [False, True, True]


@pytest.mark.parametrize(("reason", "gradings"), [(None, 2), ("judge:443 cannot be reached", 3)])
async def test_grading_is_repeated_once_for_a_judge_that_was_away_and_as_often_as_others_for_one_that_still_is(
    reason: str | None, gradings: int
) -> None:
    ran = 0

    async def fail(_command: str | Sequence[str], _files: Files) -> CommandResult:
        nonlocal ran
        ran += _command == "false"
        return ended(int(_command == "false"))

    provider = DummyProvider(str(reason), fail)
    provider.world.failed_connections = {"judge:443": reason}
    grading = graded(provider, limit=1 if reason is None else 3)
    if reason is None:
        assert not (await grading).passed
    else:
        with pytest.raises(GradingLost, match=reason) as lost:
            await grading
        assert lost.value.reason == "Unreachable"
    assert ran == gradings


@pytest.mark.parametrize("second", [0, 1])
async def test_failed_grading_is_repeated_once_when_its_sandbox_stood_still(second: int) -> None:
    codes = [1, second]

    async def verify(command: str | Sequence[str], _files: Files) -> CommandResult:
        return ended(codes.pop(0) if command == "false" else 0)

    provider = DummyProvider("still", verify)
    provider.world.stood_still = 20.0
    assert (await graded(provider, limit=1)).passed is (second == 0)
    assert not codes
