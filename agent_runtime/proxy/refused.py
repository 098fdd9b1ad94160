"""Converts failures of a call into errors of `ErrorKind`."""

from agent_runtime.models.answers import whole
from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelConfigError, ModelError, RequestRefused
from agent_runtime.proxy.chat import ErrorKind, Refused
from agent_runtime.proxy.http import BodyTooLarge
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.store import StorageError
from rollout_api.records import CallError


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


def is_failure(error: BaseException | None) -> bool:
    """Whether model or storage failed. Errors of the request's content are not failures of the model."""
    return isinstance(error, ModelError | StorageError) and refused(error).kind is not ErrorKind.BAD_REQUEST


def call_error(error: Exception) -> CallError:
    """Return the error for the record of the call."""
    reason = error.reason if isinstance(error, ModelError) else type(error).__name__
    message = error.message if isinstance(error, ModelError) else str(error)
    return CallError(reason=reason, message=whole(message), of_request=not is_failure(error))
