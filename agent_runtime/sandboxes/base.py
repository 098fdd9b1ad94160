"""What the engine asks of a sandbox provider, whether that is a process, a container engine or a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack, runtime_checkable

from rollout_api.sandbox import NetworkAccess, Resources
from rollout_api.tasks import TaskFile

if TYPE_CHECKING:
    from aiohttp import web

Phase = Literal["setup", "agent", "verifier"]
Ancestors = Literal["refuse", "replace", "follow"]

INTERRUPTED = "Interrupted"
"""Reason of an attempt that was lost because no runner held it for a while."""
DISK_FULL = "DiskFull"
"""Reason of a workspace that cannot be relied on, because others have filled the disk that it writes to."""


class Evidence(StrEnum):
    """What is known of the cause of a SandboxFailure. Who is to blame for it follows in `engine.attribution`."""

    NOT_LOST = "not lost"
    """It could not be acquired, prepared or restored."""
    OUTSIDE = "ended from outside"
    OWN_LIMIT = "used up its own limit"
    UNEXPLAINED = "lost, unexplained"


_EVIDENCE = {
    Evidence.OUTSIDE: (
        *("Evicted", "Preempted", "NodeLost", "PodDeleted", "SandboxDeleted", "Idle"),
        *(INTERRUPTED, DISK_FULL),
    ),
    Evidence.OWN_LIMIT: ("StorageExceeded",),
    # Kubernetes says OOMKilled also when a node has run out of memory, whoever used it up; so with inodes and processes.
    # A sandbox may be old when a rollout comes to it; one that has it to itself can outlast it by sleeping.
    # In `Plain` a command of the executor's user can take its descriptors or memory (prlimit), so that its calls fail.
    Evidence.UNEXPLAINED: (
        *("SandboxLost", "WorkspaceLost", "ExecutorFailed", "Crashed", "InternalError"),
        *("OOMKilled", "DeadlineExceeded", "InodesExhausted", "ProcessesExhausted"),
    ),
}


class SandboxFailure(Exception):
    """A sandbox or workspace could not be acquired, or is lost. `reason` is one CamelCase word."""

    was_unheld = False
    """The runner had stood still for longer than `sandbox.idleSeconds`, after which a sandbox ends."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message

    @property
    def evidence(self) -> Evidence:
        """What the reason says about the cause."""
        return next((kind for kind, reasons in _EVIDENCE.items() if self.reason in reasons), Evidence.NOT_LOST)


class SetupFailed(SandboxFailure):
    """A setup command ended with another code than 0, so no member of the group can start."""

    def __init__(self, message: str) -> None:
        super().__init__("SetupFailed", message)


class Fenced(Exception):
    """Another runner has taken the attempt over; this one must stop touching it."""


class WorkspaceLimit(Exception):
    """What ran in the workspace used up memory, disk or processes, or killed what serves it: the policy's own doing."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause, self.message = cause, message


class FileError(Exception):
    """A file operation failed inside the workspace: a missing file, a folder where a file was expected."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


class DiskFailed(FileError):
    """The file system below the workspace is full or broken. A workspace's own disk limit raises WorkspaceLimit instead."""


@dataclass(frozen=True)
class Fence:
    """One runner's hold on an attempt: who acts with a lower epoch, or an equal one of another holder, is refused."""

    epoch: int
    holder: str


WORKSPACE_USER = ""
"""As the `owner` of a file operation: the user of the workspace's commands."""


class StartState(Protocol):
    """A state that a workspace may begin with, such as that of a turn of another rollout."""

    name: str
    """Equal for equal states."""

    async def bring(self, workspace: Workspace, spec: WorkspaceSpec) -> None:
        """Bring a bare workspace into it, as often as it is called. Its keys carry the turn of a workspace's own life, or
        turns before any other. Raises SandboxFailure."""


@dataclass(frozen=True)
class WorkspaceSpec:
    """The workspace an attempt needs."""

    group: str
    """Group of rollouts that share the prepared state; part of every name a provider gives."""
    working_dir: str
    image: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources()
    network: Mapping[Phase, NetworkAccess] = field(default_factory=dict)
    files: Sequence[TaskFile] = ()
    setup: Sequence[str] = ()
    setup_seconds: float = 600
    start_seconds: float = 600
    snapshot_paths: Sequence[str] = ()
    """Folders that snapshots keep in `Plain` beside the working directory."""
    start: StartState | None = None
    """What brings the workspace into its prepared state, in place of files and setup."""
    alone: bool = False
    """The sandbox hosts no workspace of another attempt, so that its loss can be attributed."""
    working_dir_of_image: bool = False
    """Nobody chose `working_dir`: a provider that knows what the image says of it takes that instead."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. Exactly one of `exit_code` and `signal` is set, unless it never started (`cause`)."""

    exit_code: int | None
    signal: int | None
    cause: str | None
    """Deadline | Signal | Memory | Disk | Processes | Attacked | WorkspaceEnded when the executor ended it, else None."""
    seconds: float
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    """Bytes in all; `stdout` has the head and the tail of them."""
    stderr_bytes: int
    stdout_omitted: int = 0
    """Bytes left out between head and tail of `stdout`; `stdout_head` is where the gap is."""
    stderr_omitted: int = 0
    stdout_head: int = 0
    stderr_head: int = 0

    @property
    def ok(self) -> bool:
        """It ended by itself with code 0."""
        return self.exit_code == 0 and self.cause is None

    @property
    def end_of_output(self) -> str:
        """The end of all that it printed, where the error is: 2,000 characters at most."""
        return (self.stdout + self.stderr).decode(errors="replace").strip()[-2000:]

    @property
    def ending(self) -> str:
        """How it ended: `Deadline`, `exit code 1`, `signal 9`."""
        return self.cause or (f"exit code {self.exit_code}" if self.signal is None else f"signal {self.signal}")


@dataclass(frozen=True)
class FileStat:
    """One entry of a folder, or one path."""

    name: str
    type: Literal["file", "folder", "link", "other"]
    size: int
    mode: int
    modified: float


class RunOptions(TypedDict, total=False):
    """What a command may have beside its deadline."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    stdin: bytes
    head_bytes: int
    """Of each stream, kept from its beginning; 65,536 unless given. So is `tail_bytes` from its end."""
    tail_bytes: int


class Workspace(Protocol):
    """One isolated place where an attempt's tools run.

    Calls that change something take a `key`, `TURN:NAME`: the same key again gives the same result, or joins the call that
    still runs, also after a crash of the caller. A read with a key gives the same bytes again as well.

    File operations have the rights of the workspace's user, and what they make belongs to it. With an `owner` they have,
    in `Overlay`, the rights of the workspace's root, and what they make belongs to that user, `WORKSPACE_USER` or another.
    Give one only where the policy chooses neither path nor content.

    Every call may raise SandboxFailure (the sandbox is lost), WorkspaceLimit (the policy ended it) and Fenced.
    """

    handle: Mapping[str, Any]
    """JSON by which another process reattaches (`SandboxProvider.reattach`)."""
    description: Mapping[str, Any]
    """What this really is, for the record: provider, mode, root or image."""
    alone: bool
    """Its sandbox hosts no workspace of another attempt."""
    working_dir: str

    async def run(
        self, command: str | Sequence[str], *, key: str, deadline_seconds: float, **how: Unpack[RunOptions]
    ) -> CommandResult:
        """Run a command (a string is for the shell) to its end. Its whole process tree is ended at the deadline."""

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20) -> bytes:
        """A file's content, up to `limit` bytes. Relative paths start at the working directory. Raises FileError."""

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        key: str,
        mode: str = "644",
        replace: bool = False,
        owner: str | None = None,
    ) -> None:
        """Write a file, parents made. `replace` removes whatever stands there first. Raises FileError."""

    async def remove(self, path: str, *, key: str, owner: str | None = None) -> None:
        """Remove a file, or a folder with all below it; nothing there is fine."""

    async def stat(self, path: str, *, key: str | None = None) -> FileStat | None:
        """What stands at a path, links not followed; None when nothing does."""

    async def list(self, path: str, *, key: str | None = None) -> list[FileStat]:
        """Entries of a folder, sorted by name. Raises FileError."""

    def tar(self, path: str, *, parts: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """A tar of a file or folder, names relative to it, as a stream.

        With `parts`, of these files and folders in it alone: those that are there, and may be read.
        """

    async def untar(
        self,
        path: str,
        data: AsyncIterator[bytes],
        *,
        key: str,
        ancestors: Ancestors = "refuse",
        owner: str | None = None,
    ) -> None:
        """Unpack a tar below a path; names that leave it are refused with FileError.

        `ancestors` says what happens to a link or file where a folder belongs: `replace` puts a folder in its place,
        `follow` follows links and refuses files. With both, files get the current time and not that of the tar.
        """

    async def carry(
        self, path: str, rules: Sequence[Mapping[str, Any]], data: AsyncIterator[bytes], *, key: str
    ) -> Sequence[str]:
        """Bring the tar of an agent's files into a folder of the prepared state, by the executor's rules for each part.

        Returns what was left out and why, one line each. Raises FileError. See docs/executor.md.
        """

    async def layers(self) -> Sequence[str]:
        """Names of the frozen states that it stands on, nearest first; they never change. None in `Plain`."""

    def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        """What was changed over the layer below it, a tar with OCI whiteouts: by this workspace, or by one of `layers`.

        In `Plain` the working folder and `snapshot_paths`, whole. Raises FileError for what a tar cannot hold.
        """

    async def restore(self, data: AsyncIterator[bytes], *, key: str) -> None:
        """Apply such a tar."""

    async def freeze(self) -> None:
        """End its processes; from now on it can be read and forked, and has no place. `Plain` cannot: SandboxFailure."""

    async def fork(self, name: str, *, of: str | None = None) -> Workspace:
        """A workspace of the same attempt that begins as this frozen one is; `name` tells it apart as in `acquire`.

        `of`: the name of another frozen workspace of this sandbox, to begin with that instead. The same name again gives the
        same workspace. What it was forked from may go before it.
        """

    async def discard(self, other: str) -> None:
        """Destroy another workspace of the same attempt, by its name. Done twice is fine; a lost sandbox is fine."""

    async def enter(self, phase: Phase, *, key: str) -> None:
        """Switch the network to what the spec allows in that phase."""

    def secret(self, purpose: str) -> bytes:
        """32 bytes that every runner that holds this workspace knows, and nobody in it does; others for each purpose."""

    def serve_model(self, server: web.Server) -> AbstractAsyncContextManager[str]:
        """While the context is open, `server` answers the HTTP requests of the workspace's programs, whatever its network.

        Gives the URL by which they reach it, without a path; it stays the same until the next phase. On leaving, and when
        this process dies, answers under way break off. Requests whose answer has not begun are held, and sent again to
        whoever serves next: so `server` must bear the same request twice. It should cancel its handlers when their
        connection is lost, as a program that gives up a request has no other way to say so.
        """

    async def kill_all(self, *, key: str) -> None:
        """End every process that the tools left running."""

    async def acknowledge(self, turn: int) -> None:
        """Results of earlier turns are durable; their keys may be forgotten."""

    async def release(self) -> None:
        """Destroy the workspace and its forks with every process in them. Done twice is fine; a lost sandbox is fine."""


@dataclass(frozen=True)
class ProcessStatus:
    """A process that lives on between calls."""

    id: str
    running: bool
    exit_code: int | None
    input_bytes: int
    """Taken so far: the offset of the next input."""
    output_bytes: int
    """Said so far on standard output, or the terminal: the cursor of what comes next."""
    stderr: bytes
    """The end of what it said there."""


@dataclass(frozen=True)
class Output:
    """A piece of what such a process said."""

    data: bytes
    next: int
    """The cursor of the next piece."""
    ended: bool
    """The process has ended, or closed the stream, and this was all."""
    lost: int
    """Bytes before `data` that nobody kept."""


@runtime_checkable
class LiveProcesses(Protocol):
    """What a workspace has besides, where a process can be kept in it and talked with over several calls.

    Keys are those of `Workspace`. Input is written at an offset, so that a repeated write puts nothing in twice. All calls
    raise FileError where the request itself cannot be had.
    """

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        key: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        """Start it without a deadline; its id. `terminal` is (rows, columns) of one. Raises FileError: it did not start."""

    async def processes(self, *, key: str) -> Sequence[tuple[str, bool]]:
        """(id, whether it runs) of all that were started, less those that were forgotten with their turn."""

    async def process(self, process: str, *, key: str | None = None) -> ProcessStatus | None:
        """How it is; None when it has ended and was forgotten."""

    async def write_input(self, process: str, offset: int, data: bytes, *, key: str) -> None:
        """Write to its input; answers when it is taken, so bound it. Raises FileError when nobody reads it any more."""

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        """What it said from the cursor on, at most 1 MiB; waits for the first byte of it."""


class SandboxProvider(Protocol):
    """Where workspaces come from; one a runner."""

    name: str
    warnings: Sequence[str]
    """What is not isolated here, one line each; filled by `open`."""

    async def open(self) -> None:
        """Get ready. Raises SandboxFailure when this provider cannot work here."""

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> Workspace:
        """A new workspace in the prepared state of its group: files and setup done once, then forked where the mode can.

        `name` tells an attempt's workspaces apart (`agent`, `grading`). The same attempt, fence and name again give the
        same workspace. Raises SandboxFailure, SetupFailed, Fenced.
        """

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> Workspace:
        """The workspace that an earlier process had, with the fence raised. Raises SandboxFailure when it is gone.

        A workspace that was ended by its own programs is reattached; calls in it raise WorkspaceLimit, as before.
        """

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """Destroy workspaces that an earlier process left behind: those for which `unwanted(attempt, name)` is true."""

    async def forget_group(self, group: str) -> None:
        """No further workspace of that group will be asked for; its prepared state may go."""

    async def close(self, *, keep: bool = False) -> None:
        """Let go. `keep` leaves live workspaces to be reattached by the next process until their idle time is over."""
