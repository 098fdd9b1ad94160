"""The executor's request to a subreaper to start a command, packed so that C (subreaper.c) and Python can read it.

Strings, each ended by NUL, in the order of execve(2): user and folder (empty: the workspace's own); `program` or `shell`,
with ` terminal` behind it where it gets one; the number of arguments; the arguments; NAME=VALUE for what the environment has
beside the workspace's own. None of them can hold a NUL, for programs cannot receive one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class StartRequest(NamedTuple):
    """`argv` is a program with its arguments, or text for the shell. User and folder: None for the workspace's own."""

    argv: Sequence[str] | str
    env: Mapping[str, str]
    cwd: str | None
    user: str | None
    tty: bool

    def pack(self) -> bytes:
        """Return the packed strings. All must be encodable and without NUL."""
        arguments = [self.argv] if isinstance(self.argv, str) else self.argv
        how = ("shell" if isinstance(self.argv, str) else "program") + (" terminal" if self.tty else "")
        variables = [f"{name}={value}" for name, value in self.env.items()]
        strings = [self.user or "", self.cwd or "", how, str(len(arguments)), *arguments, *variables, ""]
        return "\0".join(strings).encode("utf-8", "surrogateescape")


def unpack(content: bytes) -> StartRequest:
    """Return the unpacked request."""
    user, cwd, how, count, *rest = content.decode("utf-8", "surrogateescape").split("\0")[:-1]
    arguments, variables = rest[: int(count)], rest[int(count) :]
    env = dict(variable.split("=", 1) for variable in variables)
    argv = arguments[0] if how.startswith("shell") else arguments
    return StartRequest(argv, env, cwd or None, user or None, how.endswith("terminal"))
