"""Converts failures of a call into errors of `ErrorKind`."""

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelConfigError, ModelError, RequestRefused
from agent_runtime.proxy.chat import ErrorKind, Refused
from agent_runtime.proxy.http import BodyTooLarge
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.store import StorageError


def refused(error: Exception) -> Refused:
    """Return the error for the client."""
    match error:
        case Refused():
            return error
        case BodyTooLarge():
            return Refused(ErrorKind.TOO_LARGE, str(error))
        case ContextExceeded():
            return Refused(ErrorKind.CONTEXT_EXCEEDED, str(error))
        case ContentFiltered():
            return Refused(ErrorKind.CONTENT_FILTERED, str(error))
        case RequestRefused() | ModelConfigError(reason="NoToolParser" | "TextModel"):
            return Refused(ErrorKind.BAD_REQUEST, error.message)
        case ModelConfigError():
            return Refused(ErrorKind.INTERNAL, f"the proxy's model cannot be used: {error}")
        case ModelError(reason="Timeout"):
            return Refused(ErrorKind.TIMEOUT, str(error))
        case ModelError(reason="RateLimited" | "NoWorker"):
            return Refused(ErrorKind.UNAVAILABLE, str(error))
        case ModelError():
            return Refused(ErrorKind.BAD_GATEWAY, str(error))
        case Superseded():
            return Refused(ErrorKind.UNAVAILABLE, "another replica has taken this session over; send the request again")
        case StorageError():
            return Refused(ErrorKind.UNAVAILABLE, "storage for this session is unavailable; send the request again")
        case _:
            return Refused(ErrorKind.INTERNAL, f"{type(error).__name__} in the proxy; see its log")
