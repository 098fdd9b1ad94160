"""The executor's ends of a process's pipes and terminal, read and written without ever blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

from agent_runtime.executor.commands.notifier import Notifier
from agent_runtime.executor.commands.output import Output
from agent_runtime.executor.errors import ApiError

# What a pipe holds by default, so one read empties it.
PIPE_BYTES = 64 * 1024
# At a command's end this many reads are enough for all that it said itself; a child that goes on writing cannot hold us.
_DRAIN_READS = 32
# One command's.
_SPARE_PIPES = 2
_END_OF_INPUT = b"\x04"


class Streams:
    """What commands are started with: pipes for output, whose reader never waits, the next one's made while one runs."""

    def __init__(self) -> None:
        self._spare: list[tuple[int, int]] = []
        self._is_refilling = False
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def nothing(self) -> int:
        """What a command reads nothing from; whoever takes it closes it."""
        return os.dup(self._null)

    def pipe(self) -> tuple[int, int]:
        """The reading and the writing end; whoever takes them closes them."""
        if not self._is_refilling:
            self._is_refilling = True
            asyncio.get_running_loop().call_soon(self._refill)
        return self._spare.pop() if self._spare else _pipe()

    def close(self) -> None:
        """Close what nobody has taken."""
        for pipe in self._spare:
            for end in pipe:
                os.close(end)
        self._spare.clear()
        os.close(self._null)

    def _refill(self) -> None:
        self._is_refilling = False
        # Where no descriptor is to be had, whoever needs one is told.
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
        """`descriptor` does not block."""
        self.is_closed = False
        self._descriptor, self._output, self._changed = descriptor, output, changed
        # Where it is read as it comes; a short command's is read once, at its end.
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Read from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)

    def drain(self) -> None:
        """Take what is there now."""
        for _ in range(_DRAIN_READS):
            if self.is_closed or not self._read():
                return

    def close(self) -> None:
        """Stop reading; whoever still writes gets a broken pipe."""
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
            # This is how a terminal says that nobody has it open any more.
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
    """Writes a process's input. `position` bytes were taken by its pipe or terminal so far."""

    def __init__(self, descriptor: int, *, is_terminal: bool) -> None:
        self.position = 0
        self._descriptor, self._is_terminal = descriptor, is_terminal
        self._is_ended = False
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._writable: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)

    def write_now(self, data: bytes) -> bytes:
        """Write what fits without waiting; gives the rest."""
        try:
            count = os.write(self._descriptor, data)
        except BlockingIOError:
            return data
        self.position += count
        return data[count:]

    async def write(self, offset: int, data: bytes, end: bool) -> None:
        """Write `data`, the input's bytes from `offset` on, leaving out what was written before; waits until all is taken.

        A cancelled call has written a part, which `position` tells. Raises Conflict for a gap and for a closed input.
        """
        async with self._turn:
            if offset > self.position:
                raise ApiError(
                    "Conflict", f"offset {offset}: the input stands at {self.position}; send what lies between"
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
        """The process reads end-of-file; a terminal is closed by its OutputEnd."""
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
            "Conflict", f"the input was closed after {self.position} bytes: it was ended, or nobody reads it"
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
