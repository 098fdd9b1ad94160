"""What a tool is: a name, a schema and an async `execute`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_runtime.sandboxes.base import CommandResult, FileStat, Output, ProcessStatus
from rollout_api.tasks import Task


class ToolWorkspace(Protocol):
    """The attempt's workspace as a tool sees it: every call gets the next idempotency key of this tool call by itself.

    A tool that makes the same calls in the same order is repeated exactly after a crash: what was done is not done twice.
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
        """A file's content. Raises FileError."""

    async def write(self, path: str, data: bytes, *, mode: str = "644") -> None:
        """Write a file, parents made. Raises FileError."""

    async def remove(self, path: str) -> None:
        """Remove a file or a folder."""

    async def stat(self, path: str) -> FileStat | None:
        """What stands at a path; None when nothing does."""

    async def list(self, path: str) -> list[FileStat]:
        """Entries of a folder. Raises FileError."""


@runtime_checkable
class ToolProcesses(Protocol):
    """Processes that a tool keeps in the workspace between its calls; see `LiveProcesses`. Keys are given by themselves."""

    call: str
    """Names this tool call among all of the attempt, the same where it is repeated."""

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        label: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        """Start it; its id, which ends with `label`."""

    async def processes(self) -> Sequence[tuple[str, bool]]:
        """(id, whether it runs)."""

    async def process(self, process: str) -> ProcessStatus | None:
        """How it was when this call asked first."""

    async def process_now(self, process: str) -> ProcessStatus | None:
        """How it is at this moment, also where the call is repeated."""

    async def write_input(self, process: str, offset: int, data: bytes) -> None:
        """Write to its input."""

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        """What it said from the cursor on. Not the same when the call is repeated: it may have said more."""


def live_processes(workspace: object) -> ToolProcesses:
    """A workspace's processes. Raises ToolError where its provider cannot keep any."""
    if not isinstance(workspace, ToolProcesses):
        raise ToolError("This sandbox cannot keep a process between calls.")
    return workspace


@dataclass(frozen=True)
class ToolContext:
    """What a tool call may use."""

    workspace: ToolWorkspace
    task: Task
    call_id: str
    seconds_left: float
    """Of the agent's time."""


@dataclass(frozen=True)
class ToolResult:
    """What the model is told, and what machines are told. `stop` ends the rollout as Finished."""

    content: str
    error: bool = False
    stop: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)


class ToolError(Exception):
    """Raised by a tool to tell the model, in plain words, what was wrong with its call."""


@runtime_checkable
class Tool(Protocol):
    """A tool. `parameters` is the JSON schema of the arguments, which are checked against it before `execute`."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def runs_in(self) -> Literal["Sandbox", "Runner"]:
        """Where its work is done; an attribute of the class does."""

    @property
    def idempotent(self) -> bool:
        """A `Runner` tool may be run again after a crash; else the model is told that the outcome is unknown."""

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Do it. Raise ToolError for what the model did wrong; other exceptions are told to it as the tool's failure."""


def takes_agents_time(tool: Tool | None) -> bool:
    """Whether the tool's time is the agent's. It is, unless the tool has an attribute `takes_agents_time` that is False."""
    return bool(getattr(tool, "takes_agents_time", True))
