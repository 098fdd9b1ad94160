"""The executor's ends of a process's pipes and terminal, read and written without blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

from agent_runtime.executor.commands.output import Output
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.notifier import Notifier

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


def _pipe() -> tuple[int, int]:
    readable, writable = os.pipe2(os.O_CLOEXEC)
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
