"""What the HTTP side of the executor needs from a host of workspaces.

`OverlayHost` and `PlainHost` implement this. Everything that touches a workspace happens *inside* it, with the tools' own
rights: the HTTP side opens no path of a workspace itself, it only moves bytes through file descriptors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Limits:
    """Bounds of one workspace; None: no bound of its own beyond the sandbox's."""

    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True)
class WorkspaceSpec:
    """One workspace to make. `parent` is the id of a frozen workspace of the same host, or None for the image's root."""

    id: str
    parent: str | None = None
    limits: Limits = Limits()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    working_dir: str = "/"


class Exit(NamedTuple):
    """How a process ended. Exactly one of `code` and `signal` is set. `cause` as in docs/executor.md, or None."""

    code: int | None
    signal: int | None
    cause: str | None = None


class Watcher(Protocol):
    """Is told what becomes of a command: at once, not a turn of the loop later. Of a short one, its end alone."""

    def started(self) -> None:
        """It runs."""

    def refused(self, failure: FileFailure | WorkspaceFailure) -> None:
        """It was not started: the program, the folder or the user does not exist, or the workspace is gone."""

    def ended(self, exit: Exit) -> None:
        """It has ended. Nothing follows."""


class Child(Protocol):
    """A command and all its descendants."""

    pid: int

    async def signal(self, number: int, *, tree: bool, cause: str | None = None) -> None:
        """Send a signal to the command, or to its whole tree, orphans that left its session included."""


class FileFailure(Exception):
    """A file operation failed inside the workspace."""

    def __init__(self, errno: int, path: str, message: str) -> None:
        super().__init__(message)
        self.errno, self.path, self.message = errno, path, message


class WorkspaceFailure(Exception):
    """The workspace itself is gone; `cause` names why (Memory, Disk, Processes, Attacked, WorkspaceEnded, CreateFailed),
    or there is no room for what is to be written (DiskFull)."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause, self.message = cause, message


class Workspace(Protocol):
    """One live or frozen workspace."""

    spec: WorkspaceSpec
    failed: asyncio.Future[WorkspaceFailure]

    def start(
        self,
        argv: Sequence[str] | str,
        watcher: Watcher,
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        cwd: str | None,
        user: str | None,
        tty: tuple[int, int] | None,
    ) -> Child:
        """Ask for a command to be started; a `str` argv is for the shell. `watcher` is told whether it was. The three
        descriptors are the child's ends and are closed by this call. With `tty` (rows, columns), all three are the slave
        end of a terminal opened by `open_terminal`, and it becomes the controlling one. Raises FileFailure and
        WorkspaceFailure for what need not even be asked.
        """

    async def open_terminal(self, rows: int, columns: int) -> tuple[int, int]:
        """A new pseudo terminal of the workspace's own devpts: (master, slave) descriptors."""

    async def file(self, operation: str, arguments: Mapping[str, Any], stream: int | None = None) -> dict[str, Any]:
        """Run a file operation inside the workspace with the default user's rights: `read`, `write`, `remove`, `stat`,
        `list`, `tar`, `untar`, `carry`, `snapshot`, `restore`. `stream` is the pipe end the operation reads its body from or
        writes it to; it is closed by this call when the operation is over. Raises FileFailure.
        """

    async def freeze(self) -> None:
        """End its processes and make its layer read-only, ready to fork from."""

    async def listen(self, port: int) -> int | None:
        """A listening TCP socket on the workspace's own loopback (`port` 0: any free one), as a descriptor the executor
        accepts on (the network proxy and the model port use it), or None where the workspace has no network of its own
        (`Plain`).
        """

    async def end_processes(self, cause: str) -> None:
        """Kill everything in it, daemons that left their command included; the workspace lives on, unless this raises
        WorkspaceFailure.
        """

    def usage(self) -> dict[str, int]:
        """`memoryBytes`, `processes`, `diskBytes` as last seen."""

    def layers(self) -> list[str]:
        """Ids of the frozen workspaces below it, nearest first."""

    async def destroy(self) -> None:
        """End every process in it and remove its layer."""


class WorkspaceHost(Protocol):
    """Makes workspaces; one an executor."""

    mode: str
    places: int

    async def create(self, spec: WorkspaceSpec) -> Workspace:
        """A new workspace. Raises WorkspaceFailure when it cannot be made."""

    def guarantees(self) -> dict[str, str]:
        """How each limit and each wall is kept here, or `None: <why>`."""

    async def close(self) -> None:
        """Destroy everything."""
