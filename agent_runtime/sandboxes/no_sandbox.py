"""The workspace and the provider of rollouts that need no sandbox."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.sandboxes.base import Fence, Phase, SandboxFailure, WorkspaceSpec


def _refuse(*_: Any, **__: Any) -> Any:
    raise SandboxFailure("NoSandbox", "this rollout acts in an environment beside the runner, and has no sandbox")


async def _refuse_call(*_: Any, **__: Any) -> Any:
    _refuse()


class NoSandbox:
    """Implements Workspace: every call that needs a sandbox raises SandboxFailure."""

    handle: Mapping[str, Any] = {}
    description: Mapping[str, Any] = {"provider": "none"}
    working_dir = "/"
    alone = True

    run = read = write = remove = stat = list = untar = carry = restore = freeze = fork = _refuse_call
    tar = snapshot = secret = serve_model = _refuse

    async def acknowledge(self, turn: int) -> None:
        """There are no results to forget."""

    async def release(self) -> None:
        """There is nothing to destroy."""

    async def kill_all(self, *, key: str) -> None:
        """There are no processes."""

    async def enter(self, phase: Phase, *, key: str) -> None:
        """There is no network to switch."""

    async def layers(self) -> Sequence[str]:
        return ()

    async def discard(self, other: str) -> None:
        """There are no forks."""


class NoSandboxes:
    """Implements SandboxProvider without sandboxes."""

    name = "none"
    warnings: Sequence[str] = ()

    async def open(self) -> None:
        """There is nothing to start."""

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> NoSandbox:
        return NoSandbox()

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> NoSandbox:
        return NoSandbox()

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """There are no workspaces to destroy."""

    async def forget_group(self, group: str) -> None:
        """There are no prepared states."""

    async def close(self, *, keep: bool = False) -> None:
        """There is nothing to close."""
