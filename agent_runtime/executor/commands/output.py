"""Output of one stream of a process: head and tail in memory, the middle in a file, up to a limit. New bytes fill the
head, then the tail. Bytes that leave the tail go to the file until it is full, and are only counted afterwards. So
memory is bounded for any output, and both ends are always correct.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

from agent_runtime.executor.http.fields import encoded

# The tail may exceed its cap by this much before it is cut, so that each byte is moved only a few times.
_SLACK_BYTES = 64 * 1024


class Caps(NamedTuple):
    """Bytes kept of each stream: first, last, and in between."""

    head: int = 32 * 1024
    tail: int = 32 * 1024
    spill: int = 64 * 1024 * 1024


class Piece(NamedTuple):
    """Output from a cursor on. `lost` bytes between that cursor and `data` were dropped; `next` is the cursor after it."""

    data: bytes
    next: int
    lost: int


class Output:
    """One stream. `spill_path` is created only when something leaves the tail."""

    def __init__(self, caps: Caps, spill_path: str) -> None:
        self.total = 0
        self._caps = caps
        self._head = bytearray()
        self._tail = bytearray()
        self._spill_path = spill_path
        self._spill: int | None = None
        self._spilled = 0
        self._is_spill_full = caps.spill == 0

    def feed(self, data: bytes) -> None:
        """Add output of the stream."""
        self.total += len(data)
        room = self._caps.head - len(self._head)
        if room:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        excess = len(self._tail) - self._caps.tail
        if excess > _SLACK_BYTES:
            self._evict(excess)

    def finish(self) -> None:
        """Mark the stream as ended."""
        if self._spill is not None:
            os.close(self._spill)
            self._spill = None

    def read(self, cursor: int, limit: int) -> Piece:
        """Return up to `limit` bytes from offset `cursor` (0 … total) on."""
        head_end, spill_end = len(self._head), len(self._head) + self._spilled
        tail_start = self.total - len(self._tail)
        if cursor < head_end:
            data = bytes(self._head[cursor : cursor + limit])
        elif cursor >= spill_end or not (data := self._read_spill(cursor - head_end, min(limit, spill_end - cursor))):
            lost = max(0, tail_start - cursor)
            start = cursor + lost - tail_start
            data = bytes(self._tail[start : start + limit])
            return Piece(data, cursor + lost + len(data), lost)
        return Piece(data, cursor + len(data), 0)

    def ends(self) -> tuple[bytes, bytes]:
        """Return its first and last bytes, within the caps; a status omits what is in between."""
        return bytes(self._head), bytes(self._tail[-self._caps.tail :]) if self._caps.tail else b""

    def summary(self) -> dict[str, Any]:
        """Return `{bytes, head, tail, omitted}` for a process's status."""
        head, tail = self.ends()
        return {
            "bytes": self.total,
            "head": encoded(head),
            "tail": encoded(tail),
            "omitted": self.total - len(head) - len(tail),
        }

    def discard(self) -> None:
        """Remove the file."""
        self.finish()
        if self._spilled:
            with contextlib.suppress(OSError):
                os.unlink(self._spill_path)

    def _evict(self, count: int) -> None:
        wanted = min(count, self._caps.spill - self._spilled)
        if not self._is_spill_full:
            written = self._write_spill(bytes(self._tail[:wanted]))
            self._spilled += written
            # The file must have no gaps, so write no more to it after the first omission.
            self._is_spill_full = written < count
        del self._tail[:count]

    def _write_spill(self, data: bytes) -> int:
        try:
            if self._spill is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._spill = os.open(self._spill_path, flags, 0o600)
            return os.write(self._spill, data)
        except OSError:
            # A full disk only means that the middle of the output is lost; the command must not fail because of it.
            return 0

    def _read_spill(self, offset: int, count: int) -> bytes:
        # In `Plain` the command may run as the executor's user and damage the file. Then those bytes are lost.
        try:
            with open(self._spill_path, "rb") as file:
                return os.pread(file.fileno(), count, offset)
        except OSError:
            return b""
