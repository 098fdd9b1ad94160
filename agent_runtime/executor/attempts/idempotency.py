"""Calls of an attempt with their replies: a repeated call gets the stored reply and never runs twice.

Keys are never evicted, because an evicted key could run a second time. Instead an attempt can have at most MAX_KEYS;
further calls are refused until its runner acknowledges a turn. An entry keeps a digest instead of the request; a
process start keeps a reference to the process, whose output is limited; a reply of more than SMALL_REPLY_BYTES is in a
file of the state folder. So an attempt uses at most MAX_KEYS * (SMALL_REPLY_BYTES + about 1 KiB), 12 MiB, and usually
some kilobytes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Generic, NamedTuple, TypeVar

from agent_runtime.executor.errors import NOT_REMEMBERED, ApiError, bad_request
from agent_runtime.executor.http.messages import Reply, StreamedReply
from agent_runtime.executor.notifier import Notifier

# A turn makes a few calls, and a runner acknowledges every turn or two, so this is hundreds of times more than needed.
MAX_KEYS = 4096
SMALL_REPLY_BYTES = 2048

MAX_NAME_LENGTH = 200
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_KEY = re.compile(r"(\d{1,15}):(.+)", re.DOTALL | re.ASCII)

Result = TypeVar("Result")


class Key(NamedTuple):
    """Name of a call, which is the same whenever the runner repeats it."""

    turn: int
    name: str

    def process_id(self) -> str:
        """The id of the process that this call starts: safe in a path and unique to the key."""
        plain = f"{self.turn}-{self.name}"
        safe = _UNSAFE.sub("_", plain)
        if safe == plain and len(safe) <= 100:
            return safe
        return f"{safe[:80]}~{sha256(plain.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def read_key(header: str) -> Key:
    """Parse an Idempotency-Key header. Raises BadRequest."""
    found = _KEY.fullmatch(header)
    if not found or len(found[2]) > MAX_NAME_LENGTH:
        raise bad_request(
            f"Idempotency-Key: 'TURN:NAME' expected, a whole number and up to {MAX_NAME_LENGTH} characters, "
            f"got {header[:60]!r}"
        )
    return Key(int(found[1]), found[2])


@dataclass
class Entry(Generic[Result]):
    """One call. `body_digest` is set once its whole body was read; `result` or `error` once `is_finished`."""

    request_line: str
    body_digest: bytes | None
    result: Result | None = None
    error: ApiError | None = None
    is_finished: bool = False
    finished: Notifier = field(default_factory=Notifier)

    @property
    def is_remembered(self) -> bool:
        """Whether a repeat gets the same outcome: true except for errors of calls that did nothing."""
        return self.error is None or self.error.code not in NOT_REMEMBERED


class KeyMemory(Generic[Result]):
    """The keys of one attempt. `dropped` is called with each forgotten result."""

    def __init__(self, dropped: Callable[[Result], None] = lambda _: None) -> None:
        self.watermark = 0
        self._entries: dict[Key, Entry[Result]] = {}
        self._dropped = dropped

    def find(self, key: Key, request_line: str) -> Entry[Result] | None:
        """Return the call of this key, in progress or finished; None if it must be made. Raises Forgotten, KeyReused."""
        if key.turn < self.watermark:
            raise ApiError(
                "Forgotten",
                f"Idempotency-Key {key.turn}:{key.name}: turns below {self.watermark} were acknowledged, so it is not "
                "known whether this call was made; it is not made again",
            )
        entry = self._entries.get(key)
        if entry is not None and entry.request_line != request_line:
            raise reused(key, f"it was used for {entry.request_line}, now for {request_line}")
        return entry

    def begin(self, key: Key, request_line: str, body_digest: bytes | None) -> Entry[Result]:
        """Record that this call begins. Raises TooLarge if too many are remembered."""
        if len(self._entries) >= MAX_KEYS:
            raise ApiError(
                "TooLarge",
                f"{MAX_KEYS} keys of this attempt are remembered and no more fit; acknowledge the finished turns with "
                "PUT /v1/attempts/{attempt}/watermark",
            )
        entry: Entry[Result] = Entry(request_line, body_digest)
        self._entries[key] = entry
        return entry

    def finish(self, key: Key, entry: Entry[Result], result: Result | None, error: ApiError | None) -> None:
        """Record the call's result or error. A call that did nothing is not remembered and may be made again."""
        entry.result, entry.error = result, error
        entry.is_finished = True
        if self._entries.get(key) is not entry:
            if result is not None:
                self._dropped(result)
        elif not entry.is_remembered:
            del self._entries[key]
        entry.finished.notify()

    def forget_below(self, turn: int) -> None:
        """Raise the watermark; a lower value changes nothing."""
        self.watermark = max(self.watermark, turn)
        for key in [key for key in self._entries if key.turn < self.watermark]:
            self._drop(key)

    def forget_all(self) -> None:
        """Forget every key, and keep the watermark."""
        for key in list(self._entries):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        result = self._entries.pop(key).result
        if result is not None:
            self._dropped(result)


def reused(key: Key, how: str) -> ApiError:
    """Return the refusal of a key that was used for two different calls."""
    return ApiError("KeyReused", f"Idempotency-Key {key.turn}:{key.name} names another call already: {how}")


# docs/executor.md: a read of more than this must not have a key.
MAX_KEYED_REPLY_BYTES = 1024 * 1024


class StoredReply:
    """A stored reply; a large body is kept in a file."""

    def __init__(self, reply: Reply, path: str) -> None:
        self._content_type, self._headers = reply.content_type, reply.headers
        self._body: bytes | None = reply.body
        self._path = path
        if len(reply.body) > SMALL_REPLY_BYTES and self._written(reply.body):
            self._body = None

    def reply(self) -> Reply:
        """Return the reply again."""
        body = self._body
        if body is None:
            with open(self._path, "rb") as file:
                body = file.read()
        return Reply(body, content_type=self._content_type, headers=self._headers)

    def discard(self) -> None:
        """Remove its file."""
        if self._body is None:
            # In `Plain`, commands may run as the executor's own user and damage its files.
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
    """Read a streamed reply completely. Raises TooLarge over MAX_KEYED_REPLY_BYTES."""
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
            f"the reply is over {MAX_KEYED_REPLY_BYTES} bytes, too many to remember: read it in parts, or without "
            "a key",
        )
    return reply
