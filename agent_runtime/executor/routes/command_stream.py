"""A connection that carries commands; docs/executor.md, "Commands", describes its frames.

It is the only way to start a command. Tool calls are short commands; as HTTP requests with JSON bodies, parsing took
half of our overhead (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from agent_runtime.executor.attempts import Attempt, Hold, Key, read_hold, read_key
from agent_runtime.executor.commands.processes import CommandSpec, Process
from agent_runtime.executor.commands.streams import (
    BOUNDED,
    DEADLINE_BYTES,
    ENDED,
    HEAD,
    IS_ENDED,
    IS_REFUSED,
    IS_RUNNING,
    ORDER,
    UPGRADE,
    Caps,
    framed,
)
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.http.fields import MAX_NUMBER
from agent_runtime.executor.http.messages import Switched
from agent_runtime.executor.http.server import STALL_SECONDS, log, log_defect, notice_silence
from agent_runtime.executor.routes.calls import MAX_INPUT_BYTES, MAX_JSON_BYTES, Call
from agent_runtime.executor.sandbox import Sandbox
from agent_runtime.executor.timing import Notifier

# Limits of a command's caps: bytes of the head and of the tail of each stream, and of the middle.
MAX_CAP_BYTES = 1024 * 1024
MAX_SPILL_BYTES = 1024**4
# A waiting caller gets a frame this often, because proxies and NAT tables close connections that are silent for a
# minute.
ANSWER_SECONDS = 25.0
# Limit of a frame: its strings (as for a JSON body) and standard input.
MAX_FRAME_BYTES = MAX_INPUT_BYTES + MAX_JSON_BYTES

_NUMBER_BYTES = HEAD.size - 4


async def attach(call: Call) -> Switched:
    call.upgrade(UPGRADE)
    return Switched(UPGRADE, CommandStream(call.sandbox))


class Command(NamedTuple):
    """A command in a frame. `digest` covers everything that must be the same in a repeat, so not the hold. A command
    that `lives_on` is answered when it has started, any other when it has ended.
    """

    attempt: str
    hold: Hold
    key: Key
    workspace: str
    spec: CommandSpec
    digest: bytes
    lives_on: bool


def read_command(content: bytes | bytearray) -> Command:
    """Parse the command in a frame, without its head. Raises BadRequest."""
    try:
        deadline_seconds, head, tail, spill, stdin_bytes, lives_on, rows, columns = ORDER.unpack_from(content)
        attempt, fence, rest = content[ORDER.size :].split(b"\0", 2)
        end = len(rest) - stdin_bytes
        strings = rest[: max(end, 0)].decode("utf-8", "surrogateescape").split("\0")
        key, workspace, cwd, user, how, count, *more = strings
        arguments, variables = more[: int(count)], more[int(count) :]
    except (ValueError, struct.error):
        raise bad_request("command: the frame does not match its header: strings or numbers are incomplete") from None
    if not variables or variables.pop() or len(arguments) != int(count):
        raise bad_request("command: the number of strings terminated by NUL does not match the announced counts")
    is_endless = deadline_seconds == math.inf
    if not (is_endless or 0 <= deadline_seconds <= MAX_NUMBER) or max(head, tail) > MAX_CAP_BYTES:
        raise bad_request(
            f"command: a deadline of 0 to {MAX_NUMBER:g} s, and at most {MAX_CAP_BYTES} bytes of head and tail "
            f"expected, got {deadline_seconds:g}, {head} and {tail}"
        )
    if spill > MAX_SPILL_BYTES or lives_on > 1 or (rows == 0) != (columns == 0):
        raise bad_request(
            f"command: at most {MAX_SPILL_BYTES} bytes between head and tail, 0 or 1 as the mark of a command that keeps "
            f"running, and both or neither of rows and columns expected, got {spill}, {lives_on}, {rows} and {columns}"
        )
    return Command(
        attempt.decode("latin-1"),
        read_hold(fence.decode("latin-1")),
        read_key(key),
        workspace,
        CommandSpec(
            command=_command(how.removesuffix(BOUNDED), arguments),
            cwd=cwd or None,
            env=_environment(variables),
            user=user or None,
            stdin=bytes(rest[end:]) or ("Open" if lives_on else None),
            tty=(rows, columns) if rows else None,
            deadline_seconds=None if is_endless else deadline_seconds,
            caps=Caps(head, tail, spill),
            bounded=how.endswith(BOUNDED),
        ),
        # Without the deadline: a runner that resumes has less time left for the same command.
        sha256(content[DEADLINE_BYTES : ORDER.size] + rest).digest(),
        bool(lives_on),
    )


def _command(how: str, arguments: Sequence[str]) -> Sequence[str] | str:
    if how == "shell" and len(arguments) == 1:
        return arguments[0]
    if how != "program" or not arguments:
        raise bad_request("command: a `shell` text or a `program` with its arguments expected")
    if not arguments[0]:
        raise bad_request("command: its first item names the program, and is empty")
    return arguments


def _environment(variables: Sequence[str]) -> dict[str, str]:
    env = {}
    for variable in variables:
        name, is_set, value = variable.partition("=")
        if not name or not is_set:
            raise bad_request(f"command: NAME=VALUE expected for a variable, got {variable[:80]!r}")
        env[name] = value
    return env


def started(number: int, process: Process) -> bytes:
    """Return the frame that reports a started process, or why it was not started. Without an id, the start is still
    undecided.
    """
    if process.refusal is not None:
        return refusal(number, process.refusal)
    return framed(number, bytes([IS_RUNNING]) + (process.id.encode() if process.is_settled else b""))


def answer(number: int, process: Process) -> bytes:
    """Return the frame that reports how a process has ended; before its end, the same as `started`."""
    exit = process.exit
    if process.refusal is not None or exit is None:
        return started(number, process)
    cause = (exit.cause or "").encode()
    out_head, out_tail = process.stdout.ends()
    err_head, err_tail = process.stderr.ends()
    fixed = ENDED.pack(
        IS_ENDED,
        -1 if exit.code is None else exit.code,
        exit.signal or 0,
        len(cause),
        process.seconds,
        process.stdout.total,
        len(out_head),
        len(out_tail),
        process.stderr.total,
        len(err_head),
        len(err_tail),
    )
    return framed(number, b"".join((fixed, cause, out_head, out_tail, err_head, err_tail)))


def refusal(number: int, error: ApiError) -> bytes:
    """Return the frame that reports why there is no process."""
    return framed(number, bytes([IS_REFUSED]) + json.dumps(error.body()).encode())


def final(number: int, process: Process, asked: Command) -> bytes | None:
    """Return the frame that answers a command; None if it is too early."""
    if asked.lives_on:
        return started(number, process) if process.is_settled else None
    return answer(number, process) if process.is_ended else None


class _Waiting:
    """A command without an answer so far."""

    def __init__(self, stream: CommandStream, number: int, process: Process, attempt: Attempt, asked: Command) -> None:
        self.number, self.process = number, process
        self.until = stream.loop.time() + ANSWER_SECONDS
        self._stream, self._attempt, self._asked = stream, attempt, asked
        self._is_still = False
        """Whether the last frame said that its time is not running."""
        notifiers = (process.over, process.pausing, attempt.superseded)
        self._notifiers: tuple[Notifier, ...] = (*notifiers, process.changed) if asked.lives_on else notifiers
        self._listen()

    def look(self) -> None:
        """Answer if it has started or ended, or if another runner has taken its attempt over."""
        try:
            frame = final(self.number, self.process, self._asked)
            if frame is None:
                self._attempt.fence.require(self._asked.hold)
                self._listen()  # a notifier calls each callback only once
                # After a pause, it is still until its start is decided: a frame without an id would say that too.
                if self._is_still != (self.process.is_paused or (self._is_still and not self.process.is_settled)):
                    self._stream.report(self)
                return
        except ApiError as error:
            frame = refusal(self.number, error)
        self._stream.answer(self, frame)

    def running(self) -> bytes:
        """Return the frame that reports the command so far. Without an id, its time is not running."""
        self._is_still = self.process.is_paused or not self.process.is_settled
        self._listen()
        return framed(self.number, bytes([IS_RUNNING])) if self._is_still else started(self.number, self.process)

    def _listen(self) -> None:
        for notifier in self._notifiers:
            notifier.add(self.look)
        if self._is_still and not self.process.is_settled:
            self.process.changed.add(self.look)

    def forget(self) -> None:
        """Stop watching the command: no caller waits for its answer any more."""
        for notifier in (*self._notifiers, self.process.changed):
            notifier.discard(self.look)


class CommandStream(asyncio.Protocol):
    """A connection for commands. Commands continue when it breaks; a repeat with the same key finds them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._input = bytearray()
        # Remaining bytes of an oversized frame, which are discarded.
        self._unread_bytes = 0
        # By number, ordered by due time.
        self._waiting: dict[int, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        notice_silence(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        for waiting in self._waiting.values():
            waiting.forget()
            self._sandbox.activity.end()
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        self._input += data
        while not self._transport.is_closing():
            if self._unread_bytes:
                unread = min(self._unread_bytes, len(self._input))
                del self._input[:unread]
                self._unread_bytes -= unread
            if len(self._input) < HEAD.size:
                return
            size, number = HEAD.unpack_from(self._input)
            end = HEAD.size - _NUMBER_BYTES + size
            if size < _NUMBER_BYTES or number in self._waiting:
                log(event="stream cut", message=f"not a command frame: {size} bytes, number {number}")
                self._transport.abort()
            elif size > MAX_FRAME_BYTES:
                self._unread_bytes = end
                error = ApiError("TooLarge", f"command of {size} bytes: at most {MAX_FRAME_BYTES} are accepted")
                self._transport.write(refusal(number, error))
            elif len(self._input) < end:
                return
            else:
                content = self._input[HEAD.size : end]
                del self._input[:end]
                self._ask(number, content)

    def pause_writing(self) -> None:
        # Stop reading requests from a client that does not read its answers; its commands still end.
        self._transport.pause_reading()
        self._stall = self.loop.call_later(STALL_SECONDS, self._transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._transport.resume_reading()

    def report(self, waiting: _Waiting) -> None:
        """Tell the caller that the command still runs, or is paused."""
        self._transport.write(waiting.running())
        waiting.until = self.loop.time() + ANSWER_SECONDS
        self._waiting[waiting.number] = self._waiting.pop(waiting.number)

    def answer(self, waiting: _Waiting, frame: bytes) -> None:
        """Answer a waiting command."""
        self._transport.write(frame)
        waiting.forget()
        del self._waiting[waiting.number]
        self._sandbox.activity.end()

    def _ask(self, number: int, content: bytearray) -> None:
        activity = self._sandbox.activity
        activity.begin()
        try:
            asked = read_command(content)
            attempt = self._sandbox.fenced_attempt(asked.attempt, asked.hold)
            process = attempt.start(
                asked.hold,
                asked.key,
                UPGRADE,
                asked.digest,
                lambda settled: self._sandbox.start(asked.workspace, attempt.id, asked.key, asked.spec, settled),
            )
            answered = final(number, process, asked)
            if answered is None:
                self._wait(_Waiting(self, number, process, attempt, asked))
                return
            frame = answered
        except ApiError as error:
            frame = refusal(number, error)
        except Exception:  # noqa: BLE001 - the caller gets a code, the log the reason
            log_defect("command")
            frame = refusal(
                number, ApiError("InternalError", "an internal error of the executor; see its standard error")
            )
        self._transport.write(frame)
        activity.end()

    def _wait(self, waiting: _Waiting) -> None:
        self._waiting[waiting.number] = waiting
        if self._timer is None:
            self._timer = self.loop.call_at(waiting.until, self._report_running)
        if waiting.process.is_paused:
            self.report(waiting)

    def _report_running(self) -> None:
        self._timer = None
        now = self.loop.time()
        for waiting in list(self._waiting.values()):
            if waiting.until > now:
                break
            self.report(waiting)
        if self._waiting:
            self._timer = self.loop.call_at(next(iter(self._waiting.values())).until, self._report_running)
