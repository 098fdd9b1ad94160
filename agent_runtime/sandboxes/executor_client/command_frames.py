"""Commands and their results on a command stream (docs/executor.md, "Commands"). Pure."""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent_runtime.executor.commands.frames import ENDED, IS_ENDED, IS_REFUSED, IS_RUNNING, ORDER
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure


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
    strings = [*names, cwd or "", user or "", how, str(len(arguments)), *arguments, *variables, ""]
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
