"""What callers and hosts of workspaces (overlay/) tell each other: what to make, how it ended, why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


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
