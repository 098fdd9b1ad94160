"""Output of processes: frames, limits, pipes and terminals.

Both ends of a connection for commands use the frames (docs/executor.md, "Commands"). The output of one stream keeps its
head and tail in memory, the middle in a file, up to a limit. New bytes fill the head, then the tail. Bytes that leave
the tail go to the file until it is full, and are only counted afterwards. So memory is bounded for any output, and both
ends are always correct. The executor reads and writes pipes and terminals without blocking the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
from typing import Any, NamedTuple

from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.http.fields import encoded
from agent_runtime.executor.timing import Notifier

# After `shell` or `program` in a command: it gains no rights by setuid programs.
BOUNDED = " bounded"
# The protocol to which the connection is upgraded, in the Upgrade header of the call that attaches it.
UPGRADE = "rollout-commands"
# The header of every frame: the number of bytes that follow, and the command's number.
HEAD = struct.Struct(">II")
# deadline in seconds, or infinity; bytes kept of each stream's head, tail and middle; bytes of standard input; 1 if the
# command lives on and its input stays open; rows and columns of its terminal, or 0
ORDER = struct.Struct(">dIIQIBHH")
DEADLINE_BYTES = 8
# kind; exit code, or -1; signal, or 0; bytes of the cause; seconds; then for each stream: total bytes, bytes of its
# head, bytes of its tail
ENDED = struct.Struct(">BhBBdQIIQII")
IS_ENDED, IS_RUNNING, IS_REFUSED = 0, 1, 2


def framed(number: int, content: bytes) -> bytes:
    """Return the frame with this content."""
    return HEAD.pack(HEAD.size - 4 + len(content), number) + content


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


# A pipe's default capacity, so one read empties it.
PIPE_BYTES = 64 * 1024
# At a command's end, this many reads are enough for its own output; a child that keeps writing cannot block us.
_DRAIN_READS = 32
# The pipes of one command.
_SPARE_PIPES = 2
_END_OF_INPUT = b"\x04"


class Streams:
    """Pipes for commands. Their reading ends are non-blocking, and the next pipes are created while a command runs."""

    def __init__(self) -> None:
        self._spare: list[tuple[int, int]] = []
        self._is_refilling = False
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def nothing(self) -> int:
        """Return an empty input for a command; the caller closes it."""
        return os.dup(self._null)

    def pipe(self) -> tuple[int, int]:
        """Return the reading and the writing end; the caller closes them."""
        if not self._is_refilling:
            self._is_refilling = True
            asyncio.get_running_loop().call_soon(self._refill)
        return self._spare.pop() if self._spare else _pipe()

    def close(self) -> None:
        """Close the unused pipes."""
        for pipe in self._spare:
            for end in pipe:
                os.close(end)
        self._spare.clear()
        os.close(self._null)

    def _refill(self) -> None:
        self._is_refilling = False
        # If no descriptor is available, the caller gets the error.
        with contextlib.suppress(OSError):
            while len(self._spare) < _SPARE_PIPES:
                self._spare.append(_pipe())


def open_pipe(mode: int) -> tuple[int, int]:
    """Return the reading and the writing end of a pipe whose name /proc/PID/fd/N has the given mode.

    Programs open their streams again as /dev/stdout and the like. The executor owns the pipe, and they are other users.
    """
    readable, writable = os.pipe2(os.O_CLOEXEC)
    os.fchmod(writable, mode)
    return readable, writable


def _pipe() -> tuple[int, int]:
    readable, writable = open_pipe(0o622)
    os.set_blocking(readable, False)
    return readable, writable


class OutputEnd:
    """Reads one stream into its Output until it is closed."""

    def __init__(self, descriptor: int, output: Output, changed: Notifier) -> None:
        """`descriptor` must be non-blocking."""
        self.is_closed = False
        self._descriptor, self._output, self._changed = descriptor, output, changed
        # Set when reading has started. A short command's output is read only once, at its end.
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start reading."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)

    def drain(self) -> None:
        """Read what is available now."""
        for _ in range(_DRAIN_READS):
            if self.is_closed or not self._read():
                return

    def close(self) -> None:
        """Stop reading; remaining writers get a broken pipe."""
        if not self.is_closed:
            self.is_closed = True
            if self._loop is not None:
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._output.finish()
            self._changed.notify()

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, PIPE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            # A terminal raises EIO when no process has it open.
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self.close()
            return False
        self._output.feed(data)
        self._changed.notify()
        return True


class InputEnd:
    """Writes a process's input. `position` is the number of bytes that its pipe or terminal has accepted."""

    def __init__(self, descriptor: int, *, is_terminal: bool) -> None:
        self.position = 0
        self._descriptor, self._is_terminal = descriptor, is_terminal
        self._is_ended = False
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._writable: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)

    def write_now(self, data: bytes) -> bytes:
        """Write what fits without waiting; return the rest."""
        try:
            count = os.write(self._descriptor, data)
        except BlockingIOError:
            return data
        self.position += count
        return data[count:]

    async def write(self, offset: int, data: bytes, end: bool) -> None:
        """Write `data`, the input's bytes from `offset` on, skipping what was written before; waits until all is
        accepted.

        A cancelled call has written a part, up to `position`. Raises Conflict for a gap and for a closed input.
        """
        async with self._turn:
            if offset > self.position:
                raise ApiError(
                    "Conflict",
                    f"offset {offset}: the next byte of the input is {self.position}; send the bytes in between",
                )
            data = data[self.position - offset :]
            while data:
                if self._is_ended or self._is_closed:
                    raise self._closed()
                try:
                    rest = self.write_now(data)
                except OSError as error:
                    self.close()
                    raise self._closed() from error
                if len(rest) == len(data):
                    await self._until_writable()
                data = rest
            if end and not self._is_ended and not self._is_closed:
                self._is_ended = True
                if self._is_terminal:
                    self.write_now(_END_OF_INPUT)
                else:
                    self.close()

    def close(self) -> None:
        """Let the process read end-of-file; a terminal is closed by its OutputEnd."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._writable is not None:
            asyncio.get_running_loop().remove_writer(self._descriptor)
            if not self._writable.done():
                self._writable.set_result(None)
        if not self._is_terminal:
            os.close(self._descriptor)

    def _closed(self) -> ApiError:
        return ApiError(
            "Conflict", f"the input was closed after {self.position} bytes: it was ended, or its reader has closed it"
        )

    async def _until_writable(self) -> None:
        loop = asyncio.get_running_loop()
        writable: asyncio.Future[None] = loop.create_future()
        self._writable = writable
        loop.add_writer(self._descriptor, lambda: None if writable.done() else writable.set_result(None))
        try:
            await writable
        finally:
            self._writable = None
            if not self._is_closed:
                loop.remove_writer(self._descriptor)
