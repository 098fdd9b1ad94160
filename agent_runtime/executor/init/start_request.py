"""The executor's request to a subreaper to start a command, packed so that C (subreaper.c) and Python can read it.

The strings are terminated by NUL, in this order: user and folder (empty: the workspace's defaults); `program` or
`shell`, followed by ` terminal` if the command gets one; the number of arguments; the arguments; NAME=VALUE for each
variable that the request adds to the workspace's environment. Programs cannot receive a NUL, so no string has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class StartRequest(NamedTuple):
    """`argv` is a program with its arguments, or text for the shell. None as user or folder means the workspace's
    default.
    """

    argv: Sequence[str] | str
    env: Mapping[str, str]
    cwd: str | None
    user: str | None
    tty: bool

    def pack(self) -> bytes:
        """Return the packed strings. All must be encodable, and none may contain NUL."""
        arguments = [self.argv] if isinstance(self.argv, str) else self.argv
        kind = ("shell" if isinstance(self.argv, str) else "program") + (" terminal" if self.tty else "")
        variables = [f"{name}={value}" for name, value in self.env.items()]
        strings = [self.user or "", self.cwd or "", kind, str(len(arguments)), *arguments, *variables, ""]
        return "\0".join(strings).encode("utf-8", "surrogateescape")


def unpack(content: bytes) -> StartRequest:
    """Return the unpacked request."""
    user, cwd, kind, count, *rest = content.decode("utf-8", "surrogateescape").split("\0")[:-1]
    arguments, variables = rest[: int(count)], rest[int(count) :]
    env = dict(variable.split("=", 1) for variable in variables)
    argv = arguments[0] if kind.startswith("shell") else arguments
    return StartRequest(argv, env, cwd or None, user or None, kind.endswith("terminal"))
