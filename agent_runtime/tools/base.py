"""The tool interface: a name, a schema and an async `execute`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_runtime.sandboxes.base import CommandResult, FileStat, Output, ProcessStatus
from rollout_api.tasks import Task


class ToolWorkspace(Protocol):
    """The attempt's workspace for a tool: every call automatically gets the next idempotency key of this tool call.

    If a tool makes the same calls in the same order when it is repeated after a crash, no call is executed twice.
    """

    working_dir: str

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
        """Run a command; the deadline is at most, and by default, the task's `commandSeconds`."""

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return a file's content. Raises FileError."""

    async def write(self, path: str, data: bytes, *, mode: str = "644") -> None:
        """Write a file, creating its parents. Raises FileError."""

    async def remove(self, path: str) -> None:
        """Remove a file or a folder."""

    async def stat(self, path: str) -> FileStat | None:
        """Return the entry at a path; None if there is none."""

    async def list(self, path: str) -> list[FileStat]:
        """Return the entries of a folder. Raises FileError."""


@runtime_checkable
class ToolProcesses(Protocol):
    """Processes that a tool keeps in the workspace between its calls; see `LiveProcesses`. Keys are added
    automatically.
    """

    call: str
    """Name of this tool call, unique in the attempt and the same if it is repeated."""

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        label: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        """Start a process; return its id, which ends with `label`."""

    async def processes(self) -> Sequence[tuple[str, bool]]:
        """Return (id, whether it runs) of each process."""

    async def process(self, process: str) -> ProcessStatus | None:
        """Return the process's state at the first call."""

    async def process_now(self, process: str) -> ProcessStatus | None:
        """Return its current state, also if the call is repeated."""

    async def write_input(self, process: str, offset: int, data: bytes) -> None:
        """Write to its input."""

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        """Return its output from the cursor on. A repeated call may return more."""


def live_processes(workspace: object) -> ToolProcesses:
    """Return a workspace's processes. Raises ToolError if its provider does not support them."""
    if not isinstance(workspace, ToolProcesses):
        raise ToolError("This sandbox cannot keep a process between calls.")
    return workspace


@dataclass(frozen=True)
class ToolContext:
    """Objects that a tool call may use."""

    workspace: ToolWorkspace
    task: Task
    call_id: str
    seconds_left: float
    """Remaining time of the agent."""


@dataclass(frozen=True)
class ToolResult:
    """Text for the model, and data for machines. `stop` ends the rollout as Finished."""

    content: str
    error: bool = False
    stop: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)


class ToolError(Exception):
    """Raised by a tool; the message explains to the model what was wrong with its call."""


@runtime_checkable
class Tool(Protocol):
    """A tool. `parameters` is the JSON schema of the arguments, which are checked before `execute`."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def runs_in(self) -> Literal["Sandbox", "Runner"]:
        """Return where it runs; may be a plain attribute."""

    @property
    def idempotent(self) -> bool:
        """Whether a `Runner` tool may be run again after a crash. If not, the model is informed that the outcome is
        unknown.
        """

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run the tool. Raise ToolError for mistakes of the model; other exceptions are reported to it as the tool's
        failure.
        """


def takes_agents_time(tool: Tool | None) -> bool:
    """Whether the tool's time counts as the agent's: yes, unless the tool's attribute `takes_agents_time` is False."""
    return bool(getattr(tool, "takes_agents_time", True))
