"""Errors shown to users of the command line, and their exit codes."""

import contextlib
import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every command."""

    OK = 0
    FAILED = 1
    """Rollouts were lost to infrastructure, or a check failed."""
    BAD_INPUT = 2
    ABORTED = 3
    STORAGE = 4
    BUG = 70
    """EX_SOFTWARE of sysexits.h: an internal error."""
    INTERRUPTED = 130
    """128 + SIGINT, as shells report it."""


MANIFEST_HELP = "`rolloutctl explain FIELD` describes a field, and docs/manifest.md lists all."
EXIT_CODES = (
    "Exit codes: 0 success; 1 rollouts were lost to infrastructure, or a check failed; 2 invalid input; "
    "3 the run was aborted; 4 storage error; 130 interrupted; 70 a bug."
)


class CommandError(Exception):
    """Ends a command with a message for the user. `hint` says what to do next."""

    def __init__(self, message: str, hint: str = "", code: Exit = Exit.BAD_INPUT) -> None:
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[None]:
    """Explain why a server of this command cannot listen there. Raises CommandError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        is_used = error.errno == errno.EADDRINUSE
        why = "another program uses this port" if is_used else os.strerror(error.errno).lower()
        hint = "Choose another port with --port." if is_used else "Choose another --host or --port."
        raise CommandError(f"cannot listen on {host}:{port}: {why}", hint) from error


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or nothing if no known name is similar."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
