"""Known errors have a message and an exit code, and are not reported as bugs."""

import pytest

from agent_runtime.sandboxes.base import FileError, SandboxFailure, WorkspaceLimit
from rolloutctl.errors import Exit
from rolloutctl.known_errors import as_command_error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (WorkspaceLimit("Memory", "workspace 'main' has failed"), Exit.FAILED, "Memory: workspace 'main' has failed"),
        (SandboxFailure("NoPlace", "all 1 places are taken"), Exit.FAILED, "NoPlace: all 1 places are taken"),
        (FileError("a", "a: permission denied"), Exit.BAD_INPUT, "a: permission denied"),
        (PermissionError(13, "Permission denied", "job.yaml"), Exit.BAD_INPUT, "job.yaml: permission denied"),
    ],
)
def test_errors_of_a_sandbox_are_not_reported_as_bugs(error: Exception, code: Exit, message: str) -> None:
    known = as_command_error(error)
    assert known is not None
    assert (known.code, known.message) == (code, message)
