"""A command, and what becomes of it, as they travel on a command stream (docs/executor.md, "Commands"). Pure."""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent_runtime.sandboxes.base import CommandResult, SandboxFailure

# Of every frame: the bytes that follow, and the number of the command.
HEAD = struct.Struct(">II")
# deadline in seconds, bytes kept of each stream's head and tail, bytes of standard input
_ORDER = struct.Struct(">dIII")
# kind; exit code, or -1; signal, or 0; bytes of the cause; seconds; then of each stream its bytes, and its head's and tail's
_ENDED = struct.Struct(">BhBBdQIIQII")
_IS_ENDED, _IS_RUNNING, _IS_REFUSED = 0, 1, 2


class Running(NamedTuple):
    """The command runs; `id` is its process."""

    id: str


class Refused(NamedTuple):
    """Why there is no process: the executor's error object, as it would come by HTTP."""

    body: bytes


def packed(number: int, content: bytes) -> bytes:
    """The frame with this content."""
    return HEAD.pack(HEAD.size - 4 + len(content), number) + content


def command_content(
    names: Sequence[str],
    command: str | Sequence[str],
    *,
    cwd: str | None,
    user: str | None,
    env: Mapping[str, str],
    stdin: bytes,
    deadline_seconds: float,
    head_bytes: int,
    tail_bytes: int,
) -> bytes:
    """The content of a command's frame. `names` are attempt, fence, key and workspace.

    Raises ValueError for what no program can be given: a NUL, or half of a surrogate pair.
    """
    how, arguments = ("shell", [command]) if isinstance(command, str) else ("program", command)
    variables = [f"{name}={value}" for name, value in env.items()]
    strings = [*names, cwd or "", user or "", how, str(len(arguments)), *arguments, *variables, ""]
    text = "\0".join(strings)
    if text.count("\0") >= len(strings):
        raise ValueError("a NUL character in the command, its folder, user or environment: no program can be given one")
    if any("=" in name for name in env):
        raise ValueError("a variable's name has a '=' in it: NAME=VALUE is how a program gets it")
    fixed = _ORDER.pack(deadline_seconds, head_bytes, tail_bytes, len(stdin))
    try:
        return fixed + text.encode("utf-8", "surrogateescape") + stdin
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} is half of a character: no program can be given it") from None


def answer(content: bytes | bytearray) -> CommandResult | Running | Refused:
    """What the content of an answer's frame says. Raises SandboxFailure for what is no answer."""
    if content[:1] == bytes([_IS_RUNNING]):
        return Running(content[1:].decode("ascii", "replace"))
    if content[:1] == bytes([_IS_REFUSED]):
        return Refused(bytes(content[1:]))
    try:
        _, code, signal, cause, seconds, *counts = _ENDED.unpack_from(content)
    except struct.error:
        raise _no_answer() from None
    out, out_head, out_tail, err, err_head, err_tail = counts
    stdout = _ENDED.size + cause
    stderr = stdout + out_head + out_tail
    if content[0] != _IS_ENDED or len(content) != stderr + err_head + err_tail:
        raise _no_answer()
    return CommandResult(
        exit_code=None if code < 0 else code,
        signal=signal or None,
        cause=content[_ENDED.size : stdout].decode("ascii", "replace") or None,
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


def _no_answer() -> SandboxFailure:
    return SandboxFailure("ExecutorFailed", "a command was answered with something that is no answer")
