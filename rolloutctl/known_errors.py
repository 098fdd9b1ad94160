"""Converts exceptions into messages for the user. Imported only after an exception, because it imports the whole engine."""

import os

from agent_runtime.engine.run_folder import RunInProgress
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.export.parquet import PyarrowMissing
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ModelConfigError, ModelError
from agent_runtime.recording.job_record import ManifestChanged, NameTaken
from agent_runtime.recording.journal import Superseded
from agent_runtime.recording.reader import NoSuchRun
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError
from agent_runtime.recording.stream import StreamClosed
from agent_runtime.sandboxes.base import Fenced, FileError, SandboxFailure, WorkspaceLimit
from agent_runtime.tasks import TaskSourceError
from rollout_api.manifest import ManifestError
from rolloutctl.errors import MANIFEST_HELP, CommandError, Exit

NO_MODEL = "No rollout was run. Start the model server, or correct spec.model.endpoint.baseURL (--model-url)."
TAKEN_OVER = "Another process has taken over this run; nothing is lost. Show its results with: rolloutctl results"

_KNOWN: tuple[tuple[type[Exception], Exit, str], ...] = (
    (ManifestError, Exit.BAD_INPUT, MANIFEST_HELP),
    (TaskSourceError, Exit.BAD_INPUT, ""),
    (ExtensionError, Exit.BAD_INPUT, ""),
    (ManifestChanged, Exit.BAD_INPUT, ""),
    (RunInProgress, Exit.BAD_INPUT, ""),
    (StreamClosed, Exit.BAD_INPUT, ""),
    (NameTaken, Exit.BAD_INPUT, ""),
    (NoSuchRun, Exit.BAD_INPUT, ""),
    (PyarrowMissing, Exit.BAD_INPUT, ""),
    (ModelConfigError, Exit.BAD_INPUT, ""),
    (ModelError, Exit.FAILED, NO_MODEL),
    (SandboxFailure, Exit.FAILED, ""),
    (WorkspaceLimit, Exit.FAILED, ""),
    (FileError, Exit.BAD_INPUT, ""),
    (StorageError, Exit.STORAGE, ""),
    (RecordCorrupt, Exit.STORAGE, ""),
    (AgentBroken, Exit.INTERRUPTED, ""),
    (Superseded, Exit.INTERRUPTED, TAKEN_OVER),
    (Fenced, Exit.INTERRUPTED, TAKEN_OVER),
    (OSError, Exit.BAD_INPUT, ""),
)
"""Errors that a user can act on. The first match applies."""


def as_command_error(error: Exception) -> CommandError | None:
    """Return the error with its message for the user and its exit code; None for an unexpected exception, which is a
    bug.
    """
    if isinstance(error, CommandError):
        return error
    if type(error).__str__ is OSError.__str__ and isinstance(error, OSError) and error.filename is not None:
        return CommandError(f"{os.fsdecode(error.filename)}: {(error.strerror or 'failed').lower()}")
    return next((CommandError(str(error), hint, code) for kind, code, hint in _KNOWN if isinstance(error, kind)), None)
