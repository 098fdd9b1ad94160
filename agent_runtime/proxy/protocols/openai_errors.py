"""OpenAI's error bodies (platform.openai.com/docs/guides/error-codes). Pure."""

from agent_runtime.proxy.chat import ErrorKind, JsonObject

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def openai_error(kind: ErrorKind, message: str, param: str | None = None) -> JsonObject:
    """The body of an error."""
    code = None if kind is ErrorKind.BAD_REQUEST else kind.code
    return {"error": {"message": message, "type": TYPES.get(kind.status, "server_error"), "param": param, "code": code}}
