"""The interface of sandbox providers: local processes, a container engine, or a cluster."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict, Unpack, runtime_checkable

from rollout_api.base import quantity, quantity_value
from rollout_api.cluster import MOST_LAYER_BYTES
from rollout_api.files import Dockerfile, TaskFile
from rollout_api.sandbox import NetworkAccess, Phase, Resources
from rollout_api.services import HealthCheck, ServiceState

if TYPE_CHECKING:
    from aiohttp import web

Ancestors = Literal["refuse", "replace", "follow"]

INTERRUPTED = "Interrupted"
"""Reason of an attempt that was lost because it had no runner for a while."""
ACCESS_DENIED = "AccessDenied"
"""Reason when this runner may not create sandboxes in the cluster. The run cannot continue."""
NETWORK_LOST = "NetworkLost"
"""Reason of a sandbox whose kernel acknowledges no packets, although its pod and its node run."""
DISK_FULL = "DiskFull"
"""Reason of a workspace that is unreliable, because other programs have filled its disk."""
SANDBOX_MEMORY = "SandboxMemory"
"""Reason of a workspace that was ended within its limits, because its sandbox had no memory left for all."""
OOM_KILLED = "OOMKilled"
"""Reason of a pod or a workspace in which the kernel has ended processes because memory was used up, by whomever."""

BUILD_DISK: Final = MOST_LAYER_BYTES
"""Bytes that a step of a Dockerfile may write, unless its task may write more: layers above that could not be restored."""


class Evidence(StrEnum):
    """Evidence about the cause of a SandboxFailure. `engine.attribution` decides who is responsible."""

    NOT_LOST = "not lost"
    """It could not be acquired, prepared or restored."""
    OUTSIDE = "ended from outside"
    OWN_LIMIT = "used up its own limit"
    UNEXPLAINED = "lost, unexplained"


_EVIDENCE = {
    Evidence.OUTSIDE: (
        *("Evicted", "Preempted", "NodeLost", "PodDeleted", "SandboxDeleted", "Idle", NETWORK_LOST),
        *(INTERRUPTED, DISK_FULL, SANDBOX_MEMORY),
    ),
    Evidence.OWN_LIMIT: ("StorageExceeded",),
    # These have several possible causes. Kubernetes also reports OOMKilled when another pod used up the node's memory;
    # the same holds for inodes and processes. A sandbox may be old when a rollout gets it, or a rollout may exceed its
    # lifetime by sleeping. In `Plain`, a command of the executor's user can limit the executor's descriptors or memory
    # (prlimit), so that calls fail.
    Evidence.UNEXPLAINED: (
        *("SandboxLost", "WorkspaceLost", "ExecutorFailed", "Crashed", "InternalError"),
        *(OOM_KILLED, "DeadlineExceeded", "DiskExhausted", "InodesExhausted", "ProcessesExhausted"),
    ),
}


class SandboxFailure(Exception):
    """A sandbox or workspace could not be acquired, or is lost. `reason` is one CamelCase word."""

    was_unheld = False
    """The runner was stopped for longer than `sandbox.idleSeconds`, after which a sandbox ends."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message

    @property
    def evidence(self) -> Evidence:
        """Return the evidence that the reason gives about the cause."""
        return next((kind for kind, reasons in _EVIDENCE.items() if self.reason in reasons), Evidence.NOT_LOST)


class ProgramFailed(SandboxFailure):
    """A program that another system runs and grades has failed there. Only its model calls may tell here why."""

    hung_up = False
    """It closed a model call before the answer: it gave the call up, or its sandbox was lost in it."""


class GradesItself:
    """Base of a workspace whose program contains its grading: a limit of the program does not end it."""


class SetupFailed(SandboxFailure):
    """A setup command ended with an exit code other than 0, so no member of the group can start."""

    def __init__(self, message: str) -> None:
        super().__init__("SetupFailed", message)


class Fenced(Exception):
    """Another runner has taken the attempt over; this one must make no further calls for it."""


class WorkspaceLimit(Exception):
    """Programs in the workspace used up memory, disk or processes, or killed its helper processes, which the policy
    caused.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause, self.message = cause, message


class FileError(Exception):
    """A file operation failed inside the workspace: for example a missing file, or a folder instead of a file."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


class DiskFailed(FileError):
    """The file system below the workspace is full or broken. A workspace's own disk limit raises WorkspaceLimit instead."""


@dataclass(frozen=True)
class Fence:
    """One runner's claim to an attempt. Runners with a lower epoch, or another holder of an equal one, are refused."""

    epoch: int
    holder: str


WORKSPACE_USER = ""
"""The user of the workspace's commands, as the `owner` of a file operation."""


class StartState(Protocol):
    """An initial state of a workspace, such as the state after a turn of another rollout."""

    name: str
    """Equal for equal states."""

    async def apply_to(self, workspace: Workspace, spec: WorkspaceSpec) -> None:
        """Put a new workspace into this state; may be repeated. The idempotency keys use LIFECYCLE_TURN, or turns below
        all others. Raises SandboxFailure.
        """


@dataclass(frozen=True)
class StoredLayer:
    """Files over an image, or over the layers below, that are stored elsewhere."""

    digest: str
    size: int
    """Bytes of its tar."""
    load: Callable[[], AsyncIterator[bytes]] = field(compare=False, repr=False)
    """Yields its tar, as `Workspace.snapshot` does. Raises SandboxFailure."""


@dataclass(frozen=True)
class ImageLayers:
    """An image as layers, the lowest first, and its settings for programs."""

    layers: Sequence[StoredLayer]
    env: Mapping[str, str]
    user: str | None
    entrypoint: Sequence[str]
    command: Sequence[str]


@dataclass(frozen=True)
class WorkspaceSpec:
    """The workspace that an attempt needs."""

    group: str
    """Group of rollouts that share the prepared state; part of every name that a provider creates."""
    working_dir: str
    image: str | None = None
    tenant: str = ""
    """Prefix of the names of its prepared states, different for each runner, because jobs may share an executor."""
    layers: Sequence[StoredLayer] = ()
    """Layers over the image, the lowest first. Only in `Overlay`."""
    is_bare: bool = False
    """Whether the layers are the whole root, without the image's files."""
    dockerfile: Dockerfile | None = None
    """Dockerfile whose last stage the workspace starts from. It replaces `image` and `layers`."""
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources()
    is_build: bool = False
    """Whether a step of a Dockerfile is made in it. It then has the limits of builds, and cannot fill the disk."""
    network: Mapping[Phase, NetworkAccess] = field(default_factory=dict)
    files: Sequence[TaskFile] = ()
    setup: Sequence[str] = ()
    setup_seconds: float = 600
    stores_setup: bool = False
    """Whether a layer of what files and setup change is stored and used, or already among `layers`. Only in `Overlay`."""
    start_seconds: float = 600
    snapshot_paths: Sequence[str] = ()
    """Folders that snapshots in `Plain` include besides the working directory."""
    start: StartState | None = None
    """Brings the workspace into its initial state, instead of files and setup."""
    alone: bool = False
    """The sandbox hosts no workspace of another attempt, so that its loss can be attributed."""
    is_single: bool = False
    """Whether no further workspace of its group will be requested, as in a build, so that no place is kept for one."""
    working_dir_of_image: bool = False
    """Whether `working_dir` is only a default, which the image's working folder overrides if the provider can read it.
    """
    services: Sequence[Service] = ()
    """Programs that run beside the workspace, in its network and within its limits. Only in `Overlay`."""
    prepares_for: Sequence[Service] = ()
    """Services that do not run here: a preparation is stored for workspaces that have them."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Paths of the folders that it shares with services, by the volume's name."""
    entrypoint: Sequence[str] = ()
    """ENTRYPOINT of its Dockerfile."""
    command: Sequence[str] = ()
    """CMD of its Dockerfile."""
    health: HealthCheck | None = None
    """The Dockerfile's own health check."""

    @property
    def limits(self) -> Resources:
        """Return the limits of the workspace itself; `resources` also select its sandbox."""
        return build_limits(self.resources) if self.is_build else self.resources


def build_limits(resources: Resources) -> Resources:
    """Return the limits of a build step of a task with these limits.

    It may need more memory and disk than the task. Processes are limited, because all workspaces of a pod share them.
    """
    disk = max(BUILD_DISK, int(quantity_value(resources.disk or "0")))
    return Resources(processes=resources.processes, disk=quantity(disk))


@dataclass(frozen=True)
class Service:
    """A program that runs beside a workspace, in a workspace of its own."""

    name: str
    """The name by which the others reach it."""
    workspace: WorkspaceSpec
    command: Sequence[str] = ()
    """Program and arguments, or one text for the shell; empty: the workspace's `entrypoint`."""
    args: Sequence[str] = ()
    """Arguments; without them and `command`, the workspace's `command`."""
    aliases: Sequence[str] = ()
    """Further names."""
    depends_on: Mapping[str, ServiceState] = field(default_factory=dict)
    health: HealthCheck | None = None
    """None: the workspace's `health`."""
    completes: bool = False
    """Whether the workspace is usable only after its program has ended with 0."""

    @property
    def argv(self) -> Sequence[str]:
        """Return program and arguments, or one text for the shell; empty if there is none."""
        if self.command:
            return [*self.command, *self.args]
        return [*self.workspace.entrypoint, *(self.args or self.workspace.command)]


USED_UP = frozenset({"Memory", "Disk", "Processes", "Deadline"})
"""Causes that programs in a workspace can bring about, even before a command's process has started."""


@dataclass(frozen=True)
class Carried:
    """What a grading workspace got of an agent's files."""

    dropped: Sequence[str]
    """Files that were left out, with the reasons."""
    changes: str = ""
    """Unified diff from the prepared files, with limits."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. Exactly one of `exit_code` and `signal` is set, unless it never started (`cause`)."""

    exit_code: int | None
    signal: int | None
    cause: str | None
    """Deadline | Signal | Parked | Memory | Disk | Processes | Attacked | SandboxMemory | WorkspaceEnded when the executor
    ended it, else None.
    """
    seconds: float
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    """Total bytes; `stdout` has their beginning and end."""
    stderr_bytes: int
    stdout_omitted: int = 0
    """Bytes left out between beginning and end of `stdout`; `stdout_head` is the position of the gap."""
    stderr_omitted: int = 0
    stdout_head: int = 0
    stderr_head: int = 0

    @property
    def ok(self) -> bool:
        """Whether the command exited with code 0, and was not ended by the executor."""
        return self.exit_code == 0 and self.cause is None

    @property
    def start_error(self) -> str | None:
        """Return why it could not be started; None if it started, or a limit of the workspace ended it."""
        if self.exit_code is not None or self.signal is not None or self.cause in USED_UP:
            return None
        return self.stderr.decode(errors="replace").strip() or self.cause or "it did not start"

    @property
    def end_of_output(self) -> str:
        """Return the end of its output, where errors are: at most 2,000 characters."""
        return (self.stdout + self.stderr).decode(errors="replace").strip()[-2000:]

    @property
    def ending(self) -> str:
        """Describe how it ended: `Deadline`, `exit code 1`, `signal 9`."""
        return self.cause or (f"exit code {self.exit_code}" if self.signal is None else f"signal {self.signal}")


@dataclass(frozen=True)
class FileStat:
    """One entry of a folder, or one path."""

    name: str
    type: Literal["file", "folder", "link", "other"]
    size: int
    mode: int
    modified: float
    target: str | None = None
    """Where a link leads to."""


def ignore_pauses(is_paused: bool) -> None:
    """Do nothing, for commands whose pauses change nothing."""


class RunOptions(TypedDict, total=False):
    """Options of a command besides its deadline."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    stdin: bytes
    bounded: bool
    """Neither the command nor what it starts gains rights by setuid programs such as `sudo` (no_new_privs of Linux)."""
    head_bytes: int
    """Bytes kept from the beginning of each stream; 65,536 by default. The same applies to `tail_bytes` from its end.
    """
    tail_bytes: int
    pausing: Callable[[bool], None]
    """Called when the sandbox pauses the command (True), and when it no longer does. The deadline leaves out pauses."""


class Workspace(Protocol):
    """One isolated environment in which an attempt's tools run.

    Calls that change something take a `key`, `TURN:NAME`: the same key again gives the same result, or joins the call that
    still runs, also after a crash of the caller. A read with a key gives the same bytes again as well.

    File operations have the rights of the workspace's user, which owns new files. With an `owner`, in `Overlay`, they
    have the rights of the workspace's root, and new files belong to that user, `WORKSPACE_USER` or another. Give an
    `owner` only if the policy controls neither path nor content.

    Every call may raise SandboxFailure (the sandbox is lost), WorkspaceLimit (the policy exceeded a limit) and Fenced.
    """

    handle: Mapping[str, Any]
    """JSON with which another process reattaches (`SandboxProvider.reattach`)."""
    description: Mapping[str, Any]
    """Facts about the workspace that are recorded: provider, mode, root or image."""
    alone: bool
    """Whether its sandbox hosts no workspace of another attempt."""
    working_dir: str

    async def run(
        self, command: str | Sequence[str], *, key: str, deadline_seconds: float, **how: Unpack[RunOptions]
    ) -> CommandResult:
        """Run a command (a string is for the shell) to its end. At the deadline its whole process tree is killed."""

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20, owner: str | None = None) -> bytes:
        """Return a file's content, up to `limit` bytes. Relative paths start at the working directory. Raises
        FileError.
        """

    async def write(
        self, path: str, data: bytes, *, key: str, mode: str = "644", replace: bool = False, owner: str | None = None
    ) -> None:
        """Write a file, creating its parents. `replace` first removes an existing entry. Raises FileError."""

    async def remove(self, path: str, *, key: str, owner: str | None = None) -> None:
        """Remove a file, or a folder with its contents, if it exists."""

    async def stat(self, path: str, *, key: str | None = None, owner: str | None = None) -> FileStat | None:
        """Return the entry at a path without following links; None if the path does not exist."""

    async def list(self, path: str, *, key: str | None = None) -> list[FileStat]:
        """Return the entries of a folder, sorted by name. Raises FileError."""

    def tar(self, path: str, *, parts: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """Yield a tar of a file or folder with relative names.

        With `parts`, only these files and folders in it, if they exist and are readable.
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

        `ancestors` determines the handling of a link or file in place of a folder: `refuse` raises FileError, `replace`
        creates a folder instead, `follow` follows links and refuses files.
        """

    async def carry(
        self, path: str, rules: Sequence[Mapping[str, Any]], data: AsyncIterator[bytes], *, key: str
    ) -> Carried:
        """Write the tar of an agent's files into a folder of the prepared state, by the executor's rules for each part.

        Raises FileError. See docs/executor.md.
        """

    async def layers(self) -> Sequence[str]:
        """Return the names of the frozen states below it, nearest first; they never change. None in `Plain`."""

    def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        """Yield the changes over the layer below, as a tar with OCI whiteouts: of this workspace, or of one of
        `layers`.

        In `Plain`, the whole working folder and `snapshot_paths`. Raises FileError for files that a tar cannot hold.
        """

    @property
    def services(self) -> Mapping[str, Workspace]:
        """Return the workspaces of its services, by name, to read them."""

    def paused(self) -> AbstractAsyncContextManager[None]:
        """While the context is open, its processes and those of its services stand still, so that files read meanwhile
        are of one moment.

        They also continue soon after this process has died. Raises SandboxFailure if they did not stand still all the
        time.
        """

    async def restore(self, data: AsyncIterator[bytes], *, key: str) -> None:
        """Apply such a tar."""

    async def freeze(self) -> None:
        """End its processes; then it can be read and forked, and uses no place. Not possible in `Plain`:
        SandboxFailure.
        """

    async def fork(self, name: str, *, of: str | None = None) -> Workspace:
        """Create a workspace of the same attempt from this frozen one; `name` distinguishes it as in `acquire`.

        `of`: the name of another frozen workspace of this sandbox, to start from that instead. The same name again
        returns the same workspace. The original may be removed before the fork.
        """

    async def discard(self, other: str) -> None:
        """Destroy another workspace of the same attempt by its name. Idempotent; a lost sandbox is accepted."""

    async def enter(self, phase: Phase, *, key: str) -> None:
        """Switch the network to the spec's access for that phase."""

    def secret(self, purpose: str) -> bytes:
        """Return 32 bytes, different for each purpose, that every runner with this workspace can derive but no program
        inside it.
        """

    def serve_model(self, server: web.Server) -> AbstractAsyncContextManager[str]:
        """While the context is open, `server` answers the HTTP requests of the workspace's programs, whatever its
        network.

        Gives the URL by which they reach it, without a path; it stays the same until the next phase. When the context
        ends, or this process dies, unfinished answers are cut off. Requests without the beginning of an answer are
        held, and sent to the next server. So `server` must accept the same request twice. It should cancel its handlers
        when their connection is lost, as a program that gives up a request has no other way to say so.
        """

    async def missed_requests(self) -> int:
        """The number of requests that the workspace's programs gave up without a server, since the last reply."""

    async def failed_connections(self) -> Mapping[str, str | None]:
        """Connect again to each destination that the phase's network lists, if the last connection of its programs failed.
        Returns these as `host:port`, each with why it cannot be reached now, or None. Empty in `Plain`.
        """

    async def stood_still(self) -> float:
        """Return the seconds for which its sandbox has stood still since it was created, in standstills of more than 10 s.
        Time limits of its programs may have expired then.
        """

    async def set_steady(self, is_steady: bool) -> None:
        """While it is steady, never pause its processes, also when its sandbox's memory is short. Idempotent."""

    async def kill_all(self, *, key: str) -> None:
        """Kill every process that tools left running."""

    async def acknowledge(self, turn: int) -> None:
        """Report that results of earlier turns are durable, so that the executor may forget their keys."""

    async def release(self) -> None:
        """Destroy the workspace with all its processes, its forks, and the workspaces that it was forked from, also those
        of an earlier process. Idempotent; a lost sandbox is accepted.
        """


@dataclass(frozen=True)
class ProcessStatus:
    """State of a process that outlives the call that started it."""

    id: str
    running: bool
    exit_code: int | None
    input_bytes: int
    """Bytes accepted so far: the offset of the next input."""
    output_bytes: int
    """Bytes written so far to standard output or the terminal: the cursor of the next output."""
    stderr: bytes
    """The end of its error output."""
    seconds: float = 0.0
    """Since its start, without the time in which it was paused."""


@dataclass(frozen=True)
class Output:
    """A piece of such a process's output."""

    data: bytes
    next: int
    """The cursor of the next piece."""
    ended: bool
    """The process has ended, or closed the stream, and this is the end."""
    lost: int
    """Bytes before `data` that were not kept."""


@runtime_checkable
class LiveProcesses(Protocol):
    """Optional interface of workspaces in which processes can outlive a call and be used by several calls.

    Keys are those of `Workspace`. Input is written at an offset, so that a repeated write has no effect. All calls
    raise FileError if the request itself is invalid.
    """

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        key: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        """Start a process without a deadline; return its id. `terminal` is (rows, columns). Raises FileError if it did
        not start.
        """

    async def processes(self, *, key: str) -> Sequence[tuple[str, bool]]:
        """Return (id, whether it runs) of all started processes, except forgotten ones."""

    async def process(self, process: str, *, key: str | None = None) -> ProcessStatus | None:
        """Return its state; None if it has ended and was forgotten."""

    async def write_input(self, process: str, offset: int, data: bytes, *, key: str) -> None:
        """Write to its input; returns when it is accepted, so set a time limit. Raises FileError if the input is
        closed.
        """

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        """Return its output from the cursor on, at most 1 MiB; waits for the first byte."""


SILENT_SECONDS: Final = 10.0
"""A sandbox that does not answer for so long has stood still. Pauses up to this length count as the agent's time."""


@runtime_checkable
class Checkable(Protocol):
    """Optional interface of workspaces whose sandbox can be asked whether it still works."""

    async def require_live(self) -> None:
        """Raise SandboxFailure or WorkspaceLimit unless the workspace exists and works. No tool can delay the answer."""

    def silence(self, pausing: Callable[[bool], None]) -> AbstractContextManager[None]:
        """Call `pausing` with True each time that the sandbox was silent for `SILENT_SECONDS`, and with False when it
        answers again, until the end of the block.
        """


def without_silence(workspace: Workspace, pausing: Callable[[bool], None]) -> AbstractContextManager[None]:
    """Return the context in which `pausing` is called as by `Checkable.silence`, if the workspace can be asked."""
    return workspace.silence(pausing) if isinstance(workspace, Checkable) else nullcontext()


async def standstill_of(workspace: Workspace) -> SandboxFailure | None:
    """Return why a sandbox is lost, or that it stands still: then it, and not the policy, has used up the time."""
    if not isinstance(workspace, Checkable):
        return None
    asked = time.monotonic()
    try:
        await workspace.require_live()
    except SandboxFailure as failure:
        return failure
    except WorkspaceLimit:
        return None  # the policy's
    seconds = time.monotonic() - asked
    return SandboxFailure("SandboxLost", f"it did not answer for {seconds:.0f} s") if seconds > SILENT_SECONDS else None


@runtime_checkable
class SandboxReporter(Protocol):
    """Optional interface of providers that report on their sandboxes."""

    def sandbox_states(self) -> Mapping[str, int]:
        """Return this process's sandboxes by state: `Starting`, `Ready`."""

    def waits_for(self) -> str:
        """Return why sandboxes do not start, as a message; empty if no problem is known."""


@runtime_checkable
class ImageSource(Protocol):
    """Optional interface of providers that can read images themselves."""

    async def image_layers(self, image: str) -> ImageLayers:
        """Return an image as layers. Raises SandboxFailure."""


class SandboxProvider(Protocol):
    """Source of workspaces; one for each runner."""

    name: str
    warnings: Sequence[str]
    """Isolation that this provider lacks, one line each; set by `open`."""

    async def open(self) -> None:
        """Prepare the provider. Raises SandboxFailure if it cannot work here."""

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> Workspace:
        """Return a new workspace in the prepared state of its group: files and setup are done once, then forked if the
        mode supports it.

        `name` distinguishes an attempt's workspaces (`agent`, `grading`). The same attempt, fence and name again give
        the same workspace. Raises SandboxFailure, SetupFailed, Fenced.
        """

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> Workspace:
        """Return the workspace of an earlier process, with the fence raised. Raises SandboxFailure if it no longer
        exists.

        A workspace that its own programs ended is reattached; calls in it raise WorkspaceLimit, as before.
        """

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """Destroy workspaces of an earlier process for which `unwanted(attempt, name)` is true."""

    async def forget_group(self, group: str) -> None:
        """Release the prepared state of that group, which needs no further workspace."""

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        """Close the provider. `keep` leaves live workspaces for the next process until their idle time is over; those of
        this machine for `at_most` seconds, if that is less.
        """
