"""States of a workspace that several runners share."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.sandbox import WorkspaceEntry


class SlowWorkspace:
    """Takes until `ended` is set to end its processes."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(id="w", parent=None, joins=None)
        self.failed = asyncio.get_running_loop().create_future()
        self.ports: Any = None
        self.frozen = self.is_resting = False
        self.ended = asyncio.Event()

    def layers(self) -> list[str]:
        return []

    def usage(self) -> dict[str, int]:
        return {}

    async def freeze(self) -> None:
        await self.ended.wait()
        self.frozen = True


async def test_workspace_is_frozen_only_when_others_can_start_from_it() -> None:
    workspace: Any = SlowWorkspace()
    entry = WorkspaceEntry("a", {}, workspace, "Overlay", "/nowhere")
    freezing = asyncio.create_task(entry.freeze())
    await asyncio.sleep(0)
    assert (entry.describe()["state"], entry.uses_place) == ("Live", True)
    with pytest.raises(ApiError, match="frozen"):
        entry.require_live()
    workspace.ended.set()
    await freezing
    assert (entry.describe()["state"], entry.uses_place) == ("Frozen", False)
