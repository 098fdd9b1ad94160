"""A connection that carries commands: docs/executor.md, "Commands", has its frames.

A tool call is one small command. As a request of HTTP with a body of JSON, reading and writing these took half of what we
add to it (docs/benchmarks.md). Everything else is as for a start by HTTP: fence, key, process.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from agent_runtime.executor.attempts import Attempt
from agent_runtime.executor.calls import MAX_INPUT_BYTES, MAX_JSON_BYTES, Call
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.fencing import Hold, read_hold
from agent_runtime.executor.fields import MAX_NUMBER
from agent_runtime.executor.idempotency import Key, read_key
from agent_runtime.executor.messages import Switched
from agent_runtime.executor.output import Caps
from agent_runtime.executor.process_calls import MAX_CAP_BYTES
from agent_runtime.executor.processes import Order, Process
from agent_runtime.executor.sandbox import Sandbox
from agent_runtime.executor.server import STALL_SECONDS, log, log_defect, notice_silence

# What the connection becomes, in the Upgrade header of the call that attaches it.
UPGRADE = "rollout-commands"
# Short of the minute after which proxies and NAT tables cut silent connections.
ANSWER_SECONDS = 25.0
# While it is not even known whether a command was started, there is nothing to say; this long until the next look.
_UNSETTLED_SECONDS = 1.0
# Strings within the bound of a JSON body, and standard input.
MAX_FRAME_BYTES = MAX_INPUT_BYTES + MAX_JSON_BYTES

# Of every frame: the bytes that follow, and the number of the command.
HEAD = struct.Struct(">II")
_NUMBER_BYTES = HEAD.size - 4
# deadline in seconds, bytes kept of each stream's head and tail, bytes of standard input
_ORDER = struct.Struct(">dIII")
# kind; exit code, or -1; signal, or 0; bytes of the cause; seconds; then of each stream its bytes, and its head's and tail's
_ENDED = struct.Struct(">BhBBdQIIQII")
ENDED, RUNNING, REFUSED = 0, 1, 2


def attach(call: Call) -> Switched:
    """POST /commands"""
    call.upgrade(UPGRADE)
    return Switched(UPGRADE, CommandStream(call.sandbox))


class Command(NamedTuple):
    """What a frame asks for. `digest` is of all that a repeated one has in common with it: not of who asks."""

    attempt: str
    hold: Hold
    key: Key
    workspace: str
    order: Order
    digest: bytes


def read_command(content: bytes | bytearray) -> Command:
    """The command of a frame, less its head. Raises BadRequest."""
    try:
        deadline_seconds, head, tail, stdin_bytes = _ORDER.unpack_from(content)
        attempt, fence, rest = content[_ORDER.size :].split(b"\0", 2)
        end = len(rest) - stdin_bytes
        strings = rest[: max(end, 0)].decode("utf-8", "surrogateescape").split("\0")
        key, workspace, cwd, user, how, count, *more = strings
        arguments, variables = more[: int(count)], more[int(count) :]
    except (ValueError, struct.error):
        raise bad_request("command: not the strings and numbers that were announced") from None
    if not variables or variables.pop() or len(arguments) != int(count):
        raise bad_request("command: not as many strings as were announced, each ended by a NUL")
    if not 0 <= deadline_seconds <= MAX_NUMBER or head > MAX_CAP_BYTES or tail > MAX_CAP_BYTES:
        raise bad_request(
            f"command: a deadline of 0 to {MAX_NUMBER:g} s, and at most {MAX_CAP_BYTES} bytes of head and tail expected, "
            f"got {deadline_seconds:g}, {head} and {tail}"
        )
    return Command(
        attempt.decode("latin-1"),
        read_hold(fence.decode("latin-1")),
        read_key(key),
        workspace,
        Order(
            command=_command(how, arguments),
            cwd=cwd or None,
            env=_environment(variables),
            user=user or None,
            stdin=bytes(rest[end:]) or None,
            tty=None,
            deadline_seconds=deadline_seconds,
            # Nobody reads the middle of an output that the head and the tail leave out, so nothing is spilled.
            caps=Caps(head, tail, spill=0),
        ),
        sha256(content[: _ORDER.size] + rest).digest(),
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


def answer(number: int, process: Process) -> bytes:
    """The frame that tells of a process: how it has ended, that it runs, or why it was not started."""
    if process.refusal is not None:
        return refusal(number, process.refusal)
    exit = process.exit
    if exit is None:
        return _frame(number, bytes([RUNNING]) + process.id.encode())
    cause = (exit.cause or "").encode()
    out_head, out_tail = process.stdout.ends()
    err_head, err_tail = process.stderr.ends()
    fixed = _ENDED.pack(
        ENDED,
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
    return _frame(number, b"".join((fixed, cause, out_head, out_tail, err_head, err_tail)))


def refusal(number: int, error: ApiError) -> bytes:
    """The frame that says why there is no process."""
    return _frame(number, bytes([REFUSED]) + json.dumps(error.body()).encode())


def _frame(number: int, content: bytes) -> bytes:
    return HEAD.pack(_NUMBER_BYTES + len(content), number) + content


class _Waiting:
    """A command that was asked for and has not been answered."""

    def __init__(self, stream: CommandStream, number: int, process: Process, attempt: Attempt, hold: Hold) -> None:
        self.number, self.process = number, process
        self.until = stream.loop.time() + ANSWER_SECONDS
        self._stream, self._attempt, self._hold = stream, attempt, hold
        process.over.add(self.look)
        attempt.superseded.add(self.look)

    def look(self) -> None:
        """It has ended, or somebody else has taken its attempt over."""
        if not self.process.is_ended:
            try:
                self._attempt.fence.require(self._hold)
            except ApiError as error:
                self._stream.answer(self, refusal(self.number, error))
                return
        self._stream.answer(self, answer(self.number, self.process))

    def forget(self) -> None:
        """Nobody waits for its answer any more."""
        self.process.over.discard(self.look)
        self._attempt.superseded.discard(self.look)


class CommandStream(asyncio.Protocol):
    """One such connection. What was asked for runs on when it breaks: asked again with its key, it is found."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._input = bytearray()
        # Of a frame that is too long, and is taken off the connection unread.
        self._unread_bytes = 0
        # By number, and in the order in which they are due.
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
                log(event="stream cut", message=f"no frame of commands: {size} bytes, number {number}")
                self._transport.abort()
            elif size > MAX_FRAME_BYTES:
                self._unread_bytes = end
                error = ApiError("TooLarge", f"command of {size} bytes: at most {MAX_FRAME_BYTES} are taken")
                self._transport.write(refusal(number, error))
            elif len(self._input) < end:
                return
            else:
                content = self._input[HEAD.size : end]
                del self._input[:end]
                self._ask(number, content)

    def pause_writing(self) -> None:
        # Who does not take answers is not asked for more; his commands end all the same.
        self._transport.pause_reading()
        self._stall = self.loop.call_later(STALL_SECONDS, self._transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._transport.resume_reading()

    def answer(self, waiting: _Waiting, frame: bytes) -> None:
        """Answer a command that was waited for."""
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
                lambda settled: self._sandbox.start(asked.workspace, attempt.id, asked.key, asked.order, settled),
            )
            if not process.is_ended:
                self._wait(_Waiting(self, number, process, attempt, asked.hold))
                return
            frame = answer(number, process)
        except ApiError as error:
            frame = refusal(number, error)
        except Exception:  # noqa: BLE001 - the caller gets a code, the log the reason
            log_defect("command")
            frame = refusal(number, ApiError("InternalError", "a defect of the executor; its standard error says more"))
        self._transport.write(frame)
        activity.end()

    def _wait(self, waiting: _Waiting) -> None:
        self._waiting[waiting.number] = waiting
        if self._timer is None:
            self._timer = self.loop.call_at(waiting.until, self._answer_running)

    def _answer_running(self) -> None:
        self._timer = None
        now = self.loop.time()
        for waiting in list(self._waiting.values()):
            if waiting.until > now:
                break
            if waiting.process.is_settled:
                self.answer(waiting, answer(waiting.number, waiting.process))
            else:
                waiting.until = now + _UNSETTLED_SECONDS
                self._waiting[waiting.number] = self._waiting.pop(waiting.number)
        if self._waiting:
            self._timer = self.loop.call_at(next(iter(self._waiting.values())).until, self._answer_running)
