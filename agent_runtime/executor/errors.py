"""Errors of requests: the table of docs/executor.md, and how failures of the host map to it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from agent_runtime.executor.host import FileFailure, WorkspaceFailure

STATUS_OF_CODE = {
    "BadRequest": 400,
    "Unauthorized": 401,
    "NotFound": 404,
    "Fenced": 409,
    "Conflict": 409,
    "Forgotten": 410,
    "TooLarge": 413,
    "FileError": 422,
    "KeyReused": 422,
    "WorkspaceFailed": 500,
    "InternalError": 500,
    "NoPlace": 503,
}
# Errors that are not stored under the call's key: the request had no effect and may succeed later.
NOT_REMEMBERED = frozenset({"BadRequest", "Fenced", "NoPlace"})


class ApiError(Exception):
    """An error response. `code` is one of the table; `details` are further fields of the error object."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.details = code, message, details

    @property
    def status(self) -> int:
        return STATUS_OF_CODE[self.code]

    def body(self) -> dict[str, Any]:
        """Return the JSON object for the caller."""
        return {"error": {"code": self.code, "message": self.message, **self.details}}


def bad_request(message: str) -> ApiError:
    return ApiError("BadRequest", message)


def translated(failure: FileFailure | WorkspaceFailure, *, missing_is_not_found: bool = True) -> ApiError:
    """Convert a host's failure into an error response. `missing_is_not_found` applies to operations on a named path."""
    if isinstance(failure, WorkspaceFailure):
        return ApiError("WorkspaceFailed", failure.message, cause=failure.cause)
    missing = missing_is_not_found and failure.errno in (errno.ENOENT, errno.ENOTDIR)
    return ApiError(
        "NotFound" if missing else "FileError",
        failure.message,
        errno=errno.errorcode.get(failure.errno, str(failure.errno)),
        path=failure.path,
    )


@contextlib.contextmanager
def translating(*, missing_is_not_found: bool = True) -> Iterator[None]:
    """Raise a host's failure as converted by `translated`."""
    try:
        yield
    except (FileFailure, WorkspaceFailure) as failure:
        raise translated(failure, missing_is_not_found=missing_is_not_found) from failure
