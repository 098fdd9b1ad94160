"""Replies that are kept until their turn is acknowledged."""

from __future__ import annotations

import contextlib
import os

from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.idempotency import SMALL_REPLY_BYTES
from agent_runtime.executor.messages import Reply, StreamedReply

# docs/executor.md: a read of more than this carries no key.
MAX_KEYED_REPLY_BYTES = 1024 * 1024


class StoredReply:
    """A reply, byte for byte; a large one's body lies in a file."""

    def __init__(self, reply: Reply, path: str) -> None:
        self._content_type, self._headers = reply.content_type, reply.headers
        self._body: bytes | None = reply.body
        self._path = path
        if len(reply.body) > SMALL_REPLY_BYTES and self._written(reply.body):
            self._body = None

    def reply(self) -> Reply:
        """The reply again."""
        body = self._body
        if body is None:
            with open(self._path, "rb") as file:
                body = file.read()
        return Reply(body, content_type=self._content_type, headers=self._headers)

    def discard(self) -> None:
        """Remove what it holds."""
        if self._body is None:
            # In `Plain` what runs here may be the executor's own user, and spoil its files.
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _written(self, body: bytes) -> bool:
        try:
            with open(self._path, "xb") as file:
                file.write(body)
        except OSError:
            # A full disk must not lose a reply: it then stays in memory.
            return False
        return True


async def whole(reply: Reply | StreamedReply) -> Reply:
    """A streamed reply as one. Raises TooLarge over MAX_KEYED_REPLY_BYTES."""
    if isinstance(reply, StreamedReply):
        parts, size = [], 0
        try:
            async for chunk in reply.chunks:
                parts.append(chunk)
                size += len(chunk)
                if size > MAX_KEYED_REPLY_BYTES:
                    break
        finally:
            await reply.chunks.aclose()
        reply = Reply(b"".join(parts), content_type=reply.content_type)
    if len(reply.body) > MAX_KEYED_REPLY_BYTES:
        raise ApiError(
            "TooLarge",
            f"the reply is over {MAX_KEYED_REPLY_BYTES} bytes, too many to remember: read it in parts, or without a key",
        )
    return reply
