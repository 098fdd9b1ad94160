"""Types that callers and hosts of workspaces (overlay/) share: specifications, results and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Limits:
    """Limits of one workspace; None: only the sandbox's own limit."""

    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    file_bytes: int | None = None
    leaves_free: bool = False
    """Whether it must leave as many bytes of the disk free as it uses, so that it cannot fill the disk."""


@dataclass(frozen=True)
class WorkspaceSpec:
    """A workspace to create. `parent` is the id of a frozen workspace of the same host, or None for the image's root."""

    id: str
    parent: str | None = None
    is_bare: bool = False
    """Without the image's files. A fork has the files of its parent, whatever this says."""
    joins: str | None = None
    """The id of a live workspace whose network, users and limits it shares; that one has `shares`."""
    shares: bool = False
    """Whether other workspaces may join this one."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Path of each volume in this workspace, by name. Those that it shares with others have the same name there."""
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
    """Receives notifications of a command's progress, synchronously. A short command only reports its end."""

    def started(self) -> None:
        """The command runs."""

    def refused(self, failure: FileFailure | WorkspaceFailure) -> None:
        """The command was not started: the program, the folder or the user does not exist, or the workspace has ended."""

    def ended(self, exit: Exit) -> None:
        """The command has ended. No further call follows."""


class FileFailure(Exception):
    """A file operation failed inside the workspace."""

    def __init__(self, errno: int, path: str, message: str) -> None:
        super().__init__(message)
        self.errno, self.path, self.message = errno, path, message


class WorkspaceFailure(Exception):
    """The workspace has ended or cannot be used; `cause` is one of Memory, SandboxMemory, OOMKilled, Disk, DiskFull,
    Processes, Attacked, Frozen, WorkspaceEnded and CreateFailed.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause, self.message = cause, message


class HostFailure(Exception):
    """The configured host cannot be opened; the message says why, and what to do."""
