"""For rollouts that need no sandbox: there is nothing to make, to lose or to take over."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiohttp import web

from agent_runtime.sandboxes.base import CommandResult, Fence, FileStat, Phase, SandboxFailure, WorkspaceSpec


def _none() -> SandboxFailure:
    return SandboxFailure("NoSandbox", "this rollout acts in an environment beside the runner, and has no sandbox")


class Nowhere:
    """Implements Workspace: it can be let go, and everything else is refused."""

    handle: Mapping[str, Any] = {}
    description: Mapping[str, Any] = {"provider": "none"}
    working_dir = "/"
    alone = True

    async def acknowledge(self, turn: int) -> None:
        """Nothing is remembered."""

    async def release(self) -> None:
        """Nothing is held."""

    async def kill_all(self, *, key: str) -> None:
        """Nothing runs."""

    async def enter(self, phase: Phase, *, key: str) -> None:
        """There is no network to switch."""

    async def run(self, command: str | Sequence[str], *, key: str, deadline_seconds: float, **_: Any) -> CommandResult:
        """Refused."""
        raise _none()

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20) -> bytes:
        """Refused."""
        raise _none()

    async def write(self, path: str, data: bytes, *, key: str, **_: Any) -> None:
        """Refused."""
        raise _none()

    async def remove(self, path: str, *, key: str, **_: Any) -> None:
        """Refused."""
        raise _none()

    async def stat(self, path: str, *, key: str | None = None) -> FileStat | None:
        """Refused."""
        raise _none()

    async def list(self, path: str, *, key: str | None = None) -> list[FileStat]:
        """Refused."""
        raise _none()

    def tar(self, path: str, *, parts: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """Refused."""
        raise _none()

    async def untar(self, path: str, data: AsyncIterator[bytes], *, key: str, **_: Any) -> None:
        """Refused."""
        raise _none()

    async def carry(
        self, path: str, rules: Sequence[Mapping[str, Any]], data: AsyncIterator[bytes], *, key: str
    ) -> Sequence[str]:
        """Refused."""
        raise _none()

    async def layers(self) -> Sequence[str]:
        """There are none."""
        return ()

    def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        """Refused."""
        raise _none()

    async def restore(self, data: AsyncIterator[bytes], *, key: str) -> None:
        """Refused."""
        raise _none()

    async def freeze(self) -> None:
        """Refused."""
        raise _none()

    async def fork(self, name: str, *, of: str | None = None) -> "Nowhere":
        """Refused."""
        raise _none()

    async def discard(self, other: str) -> None:
        """Nothing is held."""

    def secret(self, purpose: str) -> bytes:
        """Refused."""
        raise _none()

    def serve_model(self, server: web.Server) -> AbstractAsyncContextManager[str]:
        """Refused."""
        raise _none()


class NoSandboxes:
    """Implements SandboxProvider with nothing."""

    name = "none"
    warnings: Sequence[str] = ()

    async def open(self) -> None:
        """Nothing to get ready."""

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> Nowhere:
        """See SandboxProvider."""
        return Nowhere()

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> Nowhere:
        """See SandboxProvider."""
        return Nowhere()

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """Nothing was left behind."""

    async def forget_group(self, group: str) -> None:
        """Nothing was prepared."""

    async def close(self, *, keep: bool = False) -> None:
        """Nothing is held."""
