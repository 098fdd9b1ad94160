"""The workspace and the provider of rollouts that need no sandbox."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.sandboxes.base import Fence, SandboxFailure, Workspace, WorkspaceSpec
from rollout_api.sandbox import Phase


def _refuse(*_: Any, **__: Any) -> Any:
    raise SandboxFailure("NoSandbox", "this rollout acts in an environment of the runner, and has no sandbox")


async def _refuse_call(*_: Any, **__: Any) -> Any:
    _refuse()


class NoSandbox:
    """Implements Workspace: every call that needs a sandbox raises SandboxFailure."""

    handle: Mapping[str, Any] = {}
    description: Mapping[str, Any] = {"provider": "none"}
    working_dir = "/"
    alone = True
    services: Mapping[str, Workspace] = {}

    run = read = write = remove = stat = list = untar = carry = restore = freeze = fork = _refuse_call
    missed_requests = failed_connections = stood_still = _refuse_call
    tar = snapshot = paused = secret = serve_model = _refuse

    async def acknowledge(self, turn: int) -> None:
        """Do nothing: there are no results to forget."""

    async def release(self) -> None:
        """Do nothing: there is nothing to destroy."""

    async def set_steady(self, is_steady: bool) -> None:
        """Do nothing: there are no processes."""

    async def kill_all(self, *, key: str) -> None:
        """Do nothing: there are no processes."""

    async def enter(self, phase: Phase, *, key: str) -> None:
        """Do nothing: there is no network to switch."""

    async def layers(self) -> Sequence[str]:
        return ()

    async def discard(self, other: str) -> None:
        """Do nothing: there are no forks."""


class NoSandboxes:
    """Implements SandboxProvider without sandboxes."""

    name = "none"
    warnings: Sequence[str] = ()

    async def open(self) -> None:
        """Do nothing: there is nothing to start."""

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> NoSandbox:
        return NoSandbox()

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> NoSandbox:
        return NoSandbox()

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """Do nothing: there are no workspaces to destroy."""

    async def forget_group(self, group: str) -> None:
        """Do nothing: there are no prepared states."""

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        """Do nothing: there is nothing to close."""
