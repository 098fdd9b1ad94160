"""The attempt's workspace as one tool call sees it."""

from collections.abc import Mapping, Sequence

from agent_runtime.sandboxes.base import (
    CommandResult,
    FileStat,
    LiveProcesses,
    Output,
    ProcessStatus,
    Workspace,
)
from agent_runtime.tools.base import ToolError


class KeyedWorkspace:
    """Gives every call the next idempotency key of its tool call, and keeps commands within their time.

    Implements `agent_runtime.tools.base.ToolWorkspace` and `ToolProcesses`.
    """

    def __init__(self, workspace: Workspace, key_prefix: str, command_seconds: float) -> None:
        self._workspace = workspace
        self.call = key_prefix
        self._command_seconds = command_seconds
        self._calls = 0
        self.working_dir = workspace.working_dir

    def _next_key(self) -> str:
        self._calls += 1
        return f"{self.call}.{self._calls}"

    async def run(
        self,
        command: str | list[str],
        *,
        deadline_seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        head_bytes: int = 16_384,
        tail_bytes: int = 16_384,
    ) -> CommandResult:
        """Run a command to its end, its deadline cut to what the task and the agent's time allow."""
        deadline = min(deadline_seconds or self._command_seconds, self._command_seconds)
        return await self._workspace.run(
            command,
            key=self._next_key(),
            deadline_seconds=deadline,
            cwd=cwd,
            env=env,
            stdin=stdin,
            head_bytes=head_bytes,
            tail_bytes=tail_bytes,
        )

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """A file's content, the same bytes when the call is repeated."""
        return await self._workspace.read(path, key=self._next_key(), limit=limit)

    async def write(self, path: str, data: bytes, *, mode: str = "644") -> None:
        """Write a file."""
        await self._workspace.write(path, data, key=self._next_key(), mode=mode)

    async def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        await self._workspace.remove(path, key=self._next_key())

    async def stat(self, path: str) -> FileStat | None:
        """What stands at a path."""
        return await self._workspace.stat(path, key=self._next_key())

    async def list(self, path: str) -> list[FileStat]:
        """Entries of a folder."""
        return await self._workspace.list(path, key=self._next_key())

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        label: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        """Start a process that lives on."""
        key = f"{self._next_key()}-{label}"
        return await self._live().start_process(command, key=key, env=env, terminal=terminal)

    async def processes(self) -> Sequence[tuple[str, bool]]:
        """All processes that were started so."""
        return await self._live().processes(key=self._next_key())

    async def process(self, process: str) -> ProcessStatus | None:
        """How it was when this call asked first."""
        return await self._live().process(process, key=self._next_key())

    async def process_now(self, process: str) -> ProcessStatus | None:
        """How it is at this moment."""
        return await self._live().process(process)

    async def write_input(self, process: str, offset: int, data: bytes) -> None:
        """Write to its input."""
        await self._live().write_input(process, offset, data, key=self._next_key())

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        """What it said from the cursor on."""
        return await self._live().read_output(process, cursor, wait_seconds=wait_seconds)

    def _live(self) -> LiveProcesses:
        if not isinstance(self._workspace, LiveProcesses):
            # Not the sandbox's failure: the policy could choose to have it by calling a tool.
            raise ToolError("This sandbox cannot keep a process between calls; use commands that end.")
        return self._workspace
