"""Commands on the one connection to an executor that carries all commands of this process (docs/executor.md,
"Commands").

The executor is in a sandbox and untrusted, so frames are limited, and invalid data ends the connection.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from agent_runtime.executor.commands.streams import (
    BOUNDED,
    ENDED,
    HEAD,
    IS_ENDED,
    IS_REFUSED,
    IS_RUNNING,
    ORDER,
    framed,
)
from agent_runtime.sandboxes.base import SANDBOX_MEMORY, CommandResult, SandboxFailure, ignore_pauses
from agent_runtime.sandboxes.executor_client.connection import KEPT_SECONDS, BrokenReply


class Running(NamedTuple):
    """The command runs; `id` is its process, empty while its start is undecided."""

    id: str


class Refused(NamedTuple):
    """Why there is no process: the executor's error object, as in an HTTP response."""

    body: bytes


def command_content(
    names: Sequence[str],
    command: str | Sequence[str],
    *,
    deadline_seconds: float | None,
    cwd: str | None = None,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    bounded: bool = False,
    head_bytes: int = 65_536,
    tail_bytes: int = 65_536,
    spill_bytes: int = 0,
    lives_on: bool = False,
    terminal: tuple[int, int] | None = None,
) -> bytes:
    """Return the content of a command's frame. `names` are attempt, fence, key and workspace; `terminal` is rows and
    columns. A command that `lives_on` is answered when it has started, and its input stays open.

    Raises ValueError for arguments that no program can have: a NUL, or an unpaired surrogate.
    """
    env = env or {}
    how, arguments = ("shell", [command]) if isinstance(command, str) else ("program", command)
    variables = [f"{name}={value}" for name, value in env.items()]
    strings = [*names, cwd or "", user or "", how + BOUNDED * bounded, str(len(arguments)), *arguments, *variables, ""]
    text = "\0".join(strings)
    if text.count("\0") >= len(strings):
        raise ValueError("a NUL character in the command, its folder, user or environment: programs cannot receive one")
    if any("=" in name for name in env):
        raise ValueError("a variable's name contains '='; environment variables have the form NAME=VALUE")
    deadline = math.inf if deadline_seconds is None else deadline_seconds
    fixed = ORDER.pack(deadline, head_bytes, tail_bytes, spill_bytes, len(stdin), lives_on, *(terminal or (0, 0)))
    try:
        return fixed + text.encode("utf-8", "surrogateescape") + stdin
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} is an unpaired surrogate: programs cannot receive it") from None


def answer(content: bytes | bytearray) -> CommandResult | Running | Refused:
    """Parse the content of an answer's frame. Raises SandboxFailure if it is not an answer."""
    if content[:1] == bytes([IS_RUNNING]):
        return Running(content[1:].decode("ascii", "replace"))
    if content[:1] == bytes([IS_REFUSED]):
        return Refused(bytes(content[1:]))
    try:
        _, code, signal, cause, seconds, *counts = ENDED.unpack_from(content)
    except struct.error:
        raise no_answer() from None
    out, out_head, out_tail, err, err_head, err_tail = counts
    stdout = ENDED.size + cause
    stderr = stdout + out_head + out_tail
    if content[0] != IS_ENDED or len(content) != stderr + err_head + err_tail:
        raise no_answer()
    return CommandResult(
        exit_code=None if code < 0 else code,
        signal=signal or None,
        cause=content[ENDED.size : stdout].decode("ascii", "replace") or None,
        seconds=seconds,
        stdout=bytes(content[stdout:stderr]),
        stderr=bytes(content[stderr:]),
        stdout_bytes=out,
        stderr_bytes=err,
        stdout_omitted=out - out_head - out_tail,
        stderr_omitted=err - err_head - err_tail,
        stdout_head=out_head,
        stderr_head=err_head,
    )


def no_answer() -> SandboxFailure:
    """Return the failure of an executor that gives an invalid answer to a command."""
    return SandboxFailure("ExecutorFailed", "the executor gave an invalid answer to a command")


# While a command runs, the executor sends a message this often. After 30 s more without one, it hangs.
RUNNING_SECONDS = 25.0
SILENCE_SECONDS = RUNNING_SECONDS + 30.0
# Limit of an answer: head and tail of two streams, 1 MiB each, and the other fields.
MAX_ANSWER_BYTES = 4 * 1024 * 1024 + 64 * 1024


# A command that was paused longer in all has failed; each pause counts at least this much. Otherwise an executor could
# keep a rollout forever.
MAX_PAUSED_SECONDS, LEAST_PAUSE_SECONDS = 3600.0, 0.1


class _PendingCommand:
    """A command without an answer so far."""

    def __init__(
        self, answer: asyncio.Future[bytearray], now: float, seconds: float | None, pausing: Callable[[bool], None]
    ) -> None:
        self.answer = answer
        self.until = now + SILENCE_SECONDS
        """Time limit for the executor's silence."""
        # Limit of messages that the command still runs; None if it is answered as soon as it runs. Counting messages
        # measures the executor's time, because this process may have been stopped meanwhile.
        self._reports = None if seconds is None else int(seconds / RUNNING_SECONDS)
        self._pausing = pausing
        self._paused_at: float | None = None
        self._paused_left = MAX_PAUSED_SECONDS

    def continues(self, content: bytearray, now: float) -> bool:
        """Take a message that the command has no answer so far. Returns False if it is the answer. Raises
        SandboxFailure if the command takes too long.
        """
        if content[0] != IS_RUNNING or (self._reports is None and len(content) > 1):
            return False
        was_paused = self._paused_at is not None
        if self._paused_at is not None:
            self._paused_left -= min(max(now - self._paused_at, LEAST_PAUSE_SECONDS), SILENCE_SECONDS)
        if len(content) == 1:
            self._paused_at = now
            if not was_paused:
                self._pausing(True)
            if self._paused_left < 0:
                message = (
                    f"a command waited for more than {MAX_PAUSED_SECONDS:g} s because the sandbox's memory was short"
                )
                raise SandboxFailure(SANDBOX_MEMORY, message)
        elif was_paused:
            self._end_pause()
        elif self._reports == 0:
            raise SandboxFailure("ExecutorFailed", "a command still runs long after its deadline")
        elif self._reports is not None:
            self._reports -= 1
        self.until = now + SILENCE_SECONDS
        return True

    def leave(self) -> None:
        """Stop reporting pauses: the caller has its answer, or no longer waits for it."""
        self._end_pause()
        self._pausing = ignore_pauses

    def _end_pause(self) -> None:
        if self._paused_at is not None:
            self._paused_at = None
            self._pausing(False)


class CommandStream(asyncio.Protocol):
    """A connection for any number of concurrent commands."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._input = bytearray()
        self._is_lost = False
        self._count = 0
        self._idle_since = 0.0
        # By number, ordered by `until`.
        self._pending: dict[int, _PendingCommand] = {}
        self._patience: asyncio.TimerHandle | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the stream can take another command. An idle stream is kept as long as an idle HTTP connection."""
        if self._is_lost or self._transport.is_closing():
            return False
        return bool(self._pending) or self._idle_since > time.monotonic() - KEPT_SECONDS

    async def ask(
        self, content: bytes, seconds: float | None, pausing: Callable[[bool], None] = ignore_pauses
    ) -> bytearray:
        """Return the answer to a command, the contents of both frames. `seconds` is the time limit of the command; None
        if it is answered as soon as it runs. `pausing` is called when the executor pauses it (True) and when it no longer
        does.

        Raises OSError, TimeoutError, and SandboxFailure for a command that runs longer.
        """
        if self._is_lost:
            raise BrokenReply("the executor has closed the connection")
        self._count += 1
        answer: asyncio.Future[bytearray] = self._loop.create_future()
        pending = self._pending[self._count] = _PendingCommand(answer, self._loop.time(), seconds, pausing)
        if self._patience is None:
            self._patience = self._loop.call_at(pending.until, self._close_silent)
        self._transport.write(framed(self._count, content))
        try:
            return await answer
        finally:
            pending.leave()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._idle_since = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._patience is not None:
            self._patience.cancel()
        self._fail(BrokenReply("the executor has closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._input += data
        while len(self._input) >= HEAD.size:
            size, number = HEAD.unpack_from(self._input)
            end = 4 + size
            if not HEAD.size < end <= MAX_ANSWER_BYTES or number not in self._pending:
                self._transport.abort()
                return
            if len(self._input) < end:
                return
            content = self._input[HEAD.size : end]
            del self._input[:end]
            self._take(number, content)
        if not self._pending:
            self._idle_since = time.monotonic()

    def _take(self, number: int, content: bytearray) -> None:
        asked = self._pending.pop(number)
        try:
            if asked.continues(content, self._loop.time()):
                self._pending[number] = asked
            elif not asked.answer.done():
                asked.answer.set_result(content)
        except SandboxFailure as failure:
            if not asked.answer.done():
                asked.answer.set_exception(failure)

    def _close_silent(self) -> None:
        self._patience = None
        oldest = next(iter(self._pending.values()), None)
        if oldest is None:
            return
        if oldest.until > self._loop.time():
            self._patience = self._loop.call_at(oldest.until, self._close_silent)
            return
        self._fail(TimeoutError(f"silent for {SILENCE_SECONDS:g} s"))
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        for asked in self._pending.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)
        self._pending.clear()


class CommandStreams:
    """The single open stream, opened by `connect` on demand. `connect`, and everything here, raises OSError and
    TimeoutError.
    """

    def __init__(self, connect: Callable[[], Awaitable[CommandStream]]) -> None:
        self._connect = connect
        self._stream: CommandStream | None = None
        self._connecting = asyncio.Lock()

    async def ask(
        self, content: bytes, seconds: float | None, pausing: Callable[[bool], None] = ignore_pauses
    ) -> bytearray:
        stream = self._stream
        if stream is None or not stream.is_usable:
            async with self._connecting:
                stream = self._stream
                if stream is None or not stream.is_usable:
                    self.close()
                    stream = self._stream = await self._connect()
        return await stream.ask(content, seconds, pausing)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
