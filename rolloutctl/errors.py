"""What can go wrong for a person at the command line, and the exit code that says so to a script."""

import difflib
from collections.abc import Iterable
from enum import IntEnum

from agent_runtime.engine.run_folder import RunInProgress
from agent_runtime.export.parquet import PyarrowMissing
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ModelConfigError, ModelError
from agent_runtime.recording.job_record import ManifestChanged, NameTaken
from agent_runtime.recording.journal import Superseded
from agent_runtime.recording.reader import NoSuchRun
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError
from agent_runtime.recording.stream import StreamClosed
from agent_runtime.sandboxes.base import Fenced, SandboxFailure
from agent_runtime.tasks import TaskSourceError
from rollout_api.manifest import ManifestError


class Exit(IntEnum):
    """Exit codes, the same for every command."""

    OK = 0
    FAILED = 1
    """Rollouts were lost to infrastructure, or a check failed."""
    BAD_INPUT = 2
    ABORTED = 3
    STORAGE = 4
    BUG = 70
    """EX_SOFTWARE of sysexits.h: nothing that a person did."""
    INTERRUPTED = 130
    """128 + SIGINT, as shells report it."""


EXIT_CODES = (
    "Exit codes: 0 ok; 1 rollouts were lost to infrastructure, or a check failed; 2 the input is wrong; "
    "3 the run was given up; 4 storage; 130 interrupted; 70 a bug."
)


class CommandError(Exception):
    """Ends a command with a message for a person. `hint` says what to do next."""

    def __init__(self, message: str, hint: str = "", code: Exit = Exit.BAD_INPUT) -> None:
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


TAKEN_OVER = "Another process works on this run now; nothing is lost. Look at it with: rolloutctl results"

_KNOWN: tuple[tuple[type[Exception], Exit, str], ...] = (
    (ManifestError, Exit.BAD_INPUT, "docs/manifest.md lists every field."),
    (TaskSourceError, Exit.BAD_INPUT, ""),
    (ExtensionError, Exit.BAD_INPUT, ""),
    (ManifestChanged, Exit.BAD_INPUT, ""),
    (RunInProgress, Exit.BAD_INPUT, ""),
    (StreamClosed, Exit.BAD_INPUT, ""),
    (NameTaken, Exit.BAD_INPUT, ""),
    (NoSuchRun, Exit.BAD_INPUT, ""),
    (PyarrowMissing, Exit.BAD_INPUT, ""),
    (ModelConfigError, Exit.BAD_INPUT, ""),
    (ModelError, Exit.FAILED, "Nothing was run. Try again when the model can be reached."),
    (SandboxFailure, Exit.FAILED, ""),
    (StorageError, Exit.STORAGE, ""),
    (RecordCorrupt, Exit.STORAGE, ""),
    (Superseded, Exit.INTERRUPTED, TAKEN_OVER),
    (Fenced, Exit.INTERRUPTED, TAKEN_OVER),
    (OSError, Exit.BAD_INPUT, ""),
)
"""Errors of the parts below that a person can do something about. The first that fits counts."""


def as_command_error(error: Exception) -> CommandError | None:
    """The error as a command tells it; None for one that nobody expected."""
    if isinstance(error, CommandError):
        return error
    return next((CommandError(str(error), hint, code) for kind, code, hint in _KNOWN if isinstance(error, kind)), None)
