"""One command of a workspace: starts it, captures its output, ends it at its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import struct
import termios
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from agent_runtime.executor.commands.streams import Caps, InputEnd, Output, OutputEnd, Streams, open_pipe
from agent_runtime.executor.errors import ApiError, translated
from agent_runtime.executor.host import Exit, FileFailure, WorkspaceFailure
from agent_runtime.executor.init.channel import StartRequest
from agent_runtime.executor.overlay.workspace import Command, Workspace
from agent_runtime.executor.timing import TICK_SECONDS, Notifier, WorkingTime

# How long to wait for output of children after the command's end; its own output is already in its pipes. Commands
# without remaining children do not wait.
GRACE_SECONDS = 0.05
# Signals that end a process by default. If a caller sends one, the process gets the cause Signal.
_ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class CommandSpec(NamedTuple):
    """A command to start. A `str` is for the shell; `stdin` is None (empty), `Open`, or the bytes."""

    command: Sequence[str] | str
    cwd: str | None
    env: Mapping[str, str]
    user: str | None
    stdin: bytes | str | None
    tty: tuple[int, int] | None
    deadline_seconds: float | None
    caps: Caps
    bounded: bool = False
    """It gains no rights by the programs that it executes, such as `sudo`."""


class Process:
    """A command. It exists until its workspace is destroyed, or its key's turn is acknowledged.

    Implements `Watcher`. `settled` is called when its start has succeeded or failed: `refusal` has the reason.
    """

    def __init__(self, process_id: str, turn: int, spec: CommandSpec, streams: Streams, spill_path: str) -> None:
        self.id, self.turn = process_id, turn
        self.over = Notifier()
        self.changed = Notifier()
        self.refusal: ApiError | None = None
        self.stdout = Output(spec.caps, f"{spill_path}-stdout")
        self.stderr = Output(spec.caps, f"{spill_path}-stderr")
        self._spec, self._streams = spec, streams
        self._exit: Exit | None = None
        self._exited_at: float | None = None
        self._ended_at: float | None = None
        self.last_alive = math.inf
        """When it ended, by the loop's clock; infinite before."""
        self._cause: str | None = None
        self._child: Command | None = None
        self._ends: dict[str, OutputEnd] = {}
        self._input: InputEnd | None = None
        self._terminal: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._helpers: set[asyncio.Task[None]] = set()
        self._settled: Callable[[], None] | None = None
        self._starting = contextlib.ExitStack()

    @property
    def is_settled(self) -> bool:
        """Whether its start has succeeded or failed."""
        return self._settled is None

    @property
    def is_ended(self) -> bool:
        return self._ended_at is not None

    @property
    def exit(self) -> Exit | None:
        """How the process ended, if it has; None for a command that was not started."""
        return self._exit if self.is_ended else None

    @property
    def seconds(self) -> float:
        """Working time from its request to its end, or until now; in microsecond resolution."""
        return round((self._ended_at or self._now()) - self._started_at, 6)

    @property
    def is_paused(self) -> bool:
        """Whether it waits, because the sandbox's memory is short or the workspace's files are read."""
        return not self.is_ended and self._pause.is_on

    @property
    def pausing(self) -> Notifier:
        """Notified when `is_paused` changes."""
        return self._pause.changed

    def unpaused(self) -> contextlib.AbstractContextManager[None]:
        """Let its workspace not pause for memory while the context is open."""
        return self._pause.forbidden()

    @property
    def is_complete(self) -> bool:
        """Whether the process has ended, and its streams are closed."""
        return self.is_ended and all(end.is_closed for end in self._ends.values())

    def start(self, workspace: Workspace, env: Mapping[str, str], settled: Callable[[], None]) -> None:
        """Request its start, with `env` as its whole environment."""
        self._settled = settled
        self._pause = workspace.pause
        if self._spec.deadline_seconds is None:
            # Its caller limits the wait for the start, and that time runs on in a pause.
            self._starting.enter_context(self.unpaused())
        clock = asyncio.get_running_loop().time
        self._now = WorkingTime(lambda: clock() - workspace.pause.seconds())
        self._started_at = self._now()
        if self._spec.tty:
            self._run_in_background(self._start_in_terminal(workspace, env, self._spec.tty))
        else:
            self._request_start(workspace, env, self._open_pipes())

    async def _start_in_terminal(self, workspace: Workspace, env: Mapping[str, str], size: tuple[int, int]) -> None:
        try:
            self._terminal, slave = await workspace.open_terminal(*size)
            os.set_blocking(self._terminal, False)
            self._ends["stdout"] = OutputEnd(self._terminal, self.stdout, self.changed)
            self._input = InputEnd(self._terminal, is_terminal=True)
            streams = slave, os.dup(slave), os.dup(slave)
        except (FileFailure, WorkspaceFailure) as failure:
            self.refused(failure)
        except OSError as error:
            self._refuse(ApiError("InternalError", f"cannot allocate a terminal: {error.strerror}"))
        else:
            self._request_start(workspace, env, streams)

    def _request_start(self, workspace: Workspace, env: Mapping[str, str], streams: tuple[int, int, int]) -> None:
        spec = self._spec
        rest = spec.stdin if isinstance(spec.stdin, bytes) else b""
        if self._input is not None and rest and not spec.tty:
            rest = self._input.write_now(rest)
            if not rest:
                self._input.close()
        request = StartRequest(spec.command, env, spec.cwd, spec.user, spec.tty is not None, spec.bounded)
        try:
            self._child = workspace.start(request, self, streams, is_lasting=spec.deadline_seconds is None)
        except (FileFailure, WorkspaceFailure) as failure:
            self.refused(failure)
        if self.is_ended:
            return
        if rest and self._input is not None:
            self._run_in_background(self._input.write(self._input.position, rest, end=True))

    def started(self) -> None:
        self._start_reading()
        self._set_timer()
        self._notify_settled()

    def refused(self, failure: FileFailure | WorkspaceFailure) -> None:
        self._refuse(translated(failure, missing_is_not_found=False))

    def _refuse(self, refusal: ApiError) -> None:
        self.refusal = refusal
        self._finish()
        self.discard()

    def ended(self, exit: Exit) -> None:
        if self._exit is not None:
            return
        self._exited_at = self._now()
        if exit.cause is None and exit.signal is not None:
            exit = Exit(exit.code, exit.signal, self._cause)
        self._exit = exit
        is_complete = True
        for end in self._ends.values():
            end.drain()
            is_complete = is_complete and end.is_closed
        if is_complete:
            self._finish()
        else:
            self._start_reading()
            self._notify_settled()
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._finish)

    def _notify_settled(self) -> None:
        self._starting.close()
        settled, self._settled = self._settled, None
        if settled is not None:
            settled()
            self.changed.notify()

    def status(self) -> dict[str, Any]:
        """Return the status object of docs/executor.md."""
        ended = self.exit
        return {
            "id": self.id,
            "state": "Exited" if ended else "Running",
            "exitCode": ended.code if ended else None,
            "signal": ended.signal if ended else None,
            "cause": ended.cause if ended else None,
            "seconds": self.seconds,
            "inputBytes": self._input.position if self._input is not None else 0,
            "stdout": self.stdout.summary(),
            "stderr": self.stderr.summary(),
        }

    def output(self, stream: str) -> Output:
        """Return `stdout` or `stderr`."""
        return self.stdout if stream == "stdout" else self.stderr

    def is_output_over(self, stream: str) -> bool:
        """Whether the command itself has stopped writing to the stream; its children may continue."""
        end = self._ends.get(stream)
        return self.is_ended or end is None or end.is_closed

    async def write_input(self, offset: int, data: bytes, end: bool) -> None:
        if self._input is None:
            raise ApiError("Conflict", f"process {self.id!r} has no open input: start it with an input that stays open")
        await self._input.write(offset, data, end)

    async def signal(self, number: signal.Signals, tree: bool) -> None:
        """Send a signal. Raises Conflict if the command has ended, unless `tree` is set."""
        if self.is_ended and not tree:
            raise ApiError(
                "Conflict", f"process {self.id!r} has ended; set tree: true to signal its remaining children"
            )
        if number in _ENDING_SIGNALS:
            self._cause = self._cause or "Signal"
        assert self._child is not None
        await self._child.signal(number, tree=tree)

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size. Raises Conflict if it has none."""
        if self._terminal is None or self._ends["stdout"].is_closed:
            raise ApiError(
                "Conflict", f"process {self.id!r} has no terminal: start it with tty, and resize while it runs"
            )
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def abandon(self, cause: str) -> None:
        """Mark the process as ended, because its workspace has ended."""
        if self._exit is None:
            self._exit = Exit(None, signal.SIGKILL, cause)
        for end in self._ends.values():
            end.drain()
        self._finish()
        self._close()

    def discard(self) -> None:
        """Close and remove all its resources."""
        self._close()
        self.stdout.discard()
        self.stderr.discard()

    def _open_pipes(self) -> tuple[int, int, int]:
        if self._spec.stdin is None:
            stdin = self._streams.nothing()
        else:
            stdin, write_end = open_pipe(0o644)
            self._input = InputEnd(write_end, is_terminal=False)
            if self._spec.stdin == b"":
                self._input.close()
        read_out, stdout = self._streams.pipe()
        read_err, stderr = self._streams.pipe()
        self._ends["stdout"] = OutputEnd(read_out, self.stdout, self.changed)
        self._ends["stderr"] = OutputEnd(read_err, self.stderr, self.changed)
        return stdin, stdout, stderr

    def _start_reading(self) -> None:
        for end in self._ends.values():
            if not end.is_closed:
                end.start()

    @property
    def _left(self) -> float:
        deadline = self._spec.deadline_seconds
        return (math.inf if deadline is None else deadline) - self.seconds

    def _set_timer(self) -> None:
        # Also without a deadline: `WorkingTime` must be read regularly.
        self._timer = asyncio.get_running_loop().call_later(min(self._left, TICK_SECONDS), self._tick)

    def _tick(self) -> None:
        if self._left > 0:
            self._set_timer()
            return
        assert self._child is not None
        self._cause = "Deadline"
        self._run_in_background(self._child.signal(signal.SIGKILL, tree=True, cause="Deadline"))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            # The process or its workspace has ended since; its status has the reason.
            with contextlib.suppress(ApiError, WorkspaceFailure):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    def _finish(self) -> None:
        if self.is_ended:
            return
        self._ended_at = self._exited_at or self._now()
        self.last_alive = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._timer.cancel()
        if self._input is not None:
            self._input.close()
        self._notify_settled()
        self.over.notify()
        self.changed.notify()

    def _close(self) -> None:
        for task in self._helpers:
            task.cancel()
        if self._input is not None:
            self._input.close()
        for end in self._ends.values():
            end.close()


def signal_number(name: str) -> signal.Signals | None:
    """Return 15 for `TERM`, None for an unknown signal name."""
    return signal.Signals.__members__.get(f"SIG{name}")
