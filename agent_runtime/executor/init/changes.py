"""What an agent changed in the prepared files, as a unified diff for people. It is bounded, and grading does not need it."""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
import time
from collections import Counter
from typing import TYPE_CHECKING

from agent_runtime.executor.init.identity import Refused
from agent_runtime.executor.init.tree_rules import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_runtime.executor.init.unpacking import Target

# A diff beyond this helps nobody who reads it.
_TEXT_CHARACTERS = 128 * 1024
# Larger files are named without a diff. The time for one grows with the square of the number of lines.
_FILE_BYTES = 256 * 1024
_FILE_LINES = 3000
# The comparison looks at equal pairs of lines again and again. A source file with many empty lines has fewer.
_EQUAL_PAIRS = 100_000
# Contents that are kept until the new ones are written.
_KEPT_BYTES = 8 * 1024 * 1024
_FILES = 500
# Total time for diffs of one grading.
_SECONDS = 1.0
_NO_LINE = "\\ No newline at end of file"


class Changes:
    """Collects the files of a tree before they are replaced or removed, and compares them at the end."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[bytes | None, Callable[[], bytes | None]]] = {}
        """By shown path: the content, None if it is too large or not a file, and how to read the content at the end."""
        self._kept = 0
        self._is_whole = True

    def add(self, shown_as: str, target: Target, parts: list[str]) -> None:
        """Keep a file that will be written or removed. The first content counts."""
        if shown_as in self._before:
            return
        if len(self._before) >= _FILES:
            self._is_whole = False
            return
        content = read(target, parts) if self._kept < _KEPT_BYTES else None
        self._kept += len(content or b"")
        self._before[shown_as] = content, lambda: read(target, parts)

    def report(self) -> str:
        """Return the diff."""
        text, size, end = [], 0, time.monotonic() + _SECONDS
        for path, (before, read_after) in sorted(self._before.items()):
            name, after = shown(path), read_after()
            if before == after is not None:
                continue
            found = "\n".join(_lines(name, before, after)) if time.monotonic() < end else _only_named(name)
            if not found:
                continue
            if size + len(found) > _TEXT_CHARACTERS:
                found = _only_named(name)
            size += len(found)
            if size > _TEXT_CHARACTERS:
                self._is_whole = False
                break
            text.append(found)
        if not self._is_whole:
            text.append("Further files may have changed.")
        return "\n".join(text)


ABSENT = b""
"""Content of a file that does not exist. An empty file is a rare thing to create."""


def read(target: Target, parts: list[str]) -> bytes | None:
    """Return a file's content, `ABSENT` without one; None if it is large, or another kind of entry."""
    try:
        parent = target.parent(parts, is_made=False)
    except FileNotFoundError:
        return ABSENT
    except (OSError, Refused):
        return None
    try:
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return ABSENT
    except OSError:
        return None
    finally:
        os.close(parent)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _FILE_BYTES:
            return None
        with contextlib.suppress(OSError):
            return os.read(descriptor, _FILE_BYTES + 1)
        return None
    finally:
        os.close(descriptor)


def _lines(path: str, before: bytes | None, after: bytes | None) -> Iterator[str]:
    if before is None or after is None or b"\0" in before or b"\0" in after:
        yield _only_named(path)
        return
    old, new = (text.decode("utf-8", "replace").split("\n") for text in (before, after))
    if len(old) + len(new) > _FILE_LINES or _equal_pairs(old, new) > _EQUAL_PAIRS:
        yield _only_named(path)
        return
    for lines in (old, new):
        if lines[-1] == "":
            lines.pop()
        else:
            lines.append(_NO_LINE)
    names = ("/dev/null" if before == ABSENT else f"a/{path}", "/dev/null" if after == ABSENT else f"b/{path}")
    yield from difflib.unified_diff(old, new, *names, lineterm="")


def _equal_pairs(old: list[str], new: list[str]) -> int:
    counts = Counter(new)
    return sum(counts[line] for line in old)


def _only_named(path: str) -> str:
    return f"--- a/{path}\n+++ b/{path}\n(changed; too large or not text)"
