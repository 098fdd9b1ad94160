"""Parts that OpenAI's APIs share: error bodies (platform.openai.com/docs/guides/error-codes), and streams of chunks.
Pure.
"""

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import PING, ChatRequest, ErrorKind, JsonObject, StreamedText, sse

DONE = b"data: [DONE]\n\n"

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class OpenAIErrors:
    """The errors of a `Translation`."""

    def error(self, kind: ErrorKind, message: str, param: str | None = None) -> JsonObject:
        return openai_error(kind, message, param)


def openai_error(kind: ErrorKind, message: str, param: str | None = None) -> JsonObject:
    """Return the body of an error."""
    code = None if kind is ErrorKind.BAD_REQUEST else kind.code
    return {"error": {"message": message, "type": TYPES.get(kind.status, "server_error"), "param": param, "code": code}}


class ChunkEncoder:
    """The parts of an `Encoder` that chat completions and completions share; an error replaces a chunk."""

    def __init__(self, request: ChatRequest, head: JsonObject) -> None:
        self._extra, self._head = request.extra, head
        self._sent, self._thought = StreamedText(), StreamedText()
        self._usage = {"usage": None} if self._extra["usage"] else {}

    def ping(self) -> bytes:
        return PING

    def error(self, kind: ErrorKind, message: str) -> bytes:
        return sse(openai_error(kind, message)) + DONE

    def _chunk(self, choice: JsonObject, **fields: object) -> bytes:
        return sse({**self._head, **fields, "choices": [{"index": 0, **choice}], **self._usage})

    def _end(self, reply: ModelReply) -> bytes:
        counts = sse({**self._head, "choices": [], "usage": usage(reply)}) if self._usage else b""
        return counts + DONE


def usage(reply: ModelReply) -> JsonObject:
    counted = reply.usage
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
    }
