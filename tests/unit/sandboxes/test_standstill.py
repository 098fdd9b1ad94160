"""Whether a sandbox stood still when the agent's time was over: then the time is not the policy's."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

from agent_runtime.sandboxes import base
from agent_runtime.sandboxes.base import SandboxFailure, Workspace, WorkspaceLimit, standstill_of


class Asked:
    """A workspace whose sandbox answers as given."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self._seconds, self._error = seconds, error

    async def require_live(self) -> None:
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error

    def silence(self, pausing: Callable[[bool], None]) -> AbstractContextManager[None]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("workspace", "reason"),
    [
        (Asked(), None),
        (Asked(0.3), "SandboxLost"),
        (Asked(error=SandboxFailure("NodeLost", "gone")), "NodeLost"),
        (Asked(error=WorkspaceLimit("Memory", "used up")), None),
        (object(), None),
    ],
    ids=["answers", "answers late", "is lost", "ended by its own limit", "cannot be asked"],
)
async def test_a_sandbox_that_stood_still_is_told(
    workspace: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SILENT_SECONDS", 0.2)
    found = await standstill_of(cast(Workspace, workspace))
    assert (found and found.reason) == reason
