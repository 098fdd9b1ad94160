"""Patterns of .dockerignore and of COPY. Pure.

The rules of .dockerignore are those of https://github.com/moby/patternmatcher; a source of COPY follows Go's
filepath.Match.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from functools import lru_cache


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern (`*`, `?`, `[…]`, `**` for any folders) matches a whole path."""
    return _compiled(pattern).fullmatch(path) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    found: list[str] = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character == "*":
            if pattern.startswith("*", position):
                position += 1
                if pattern.startswith("/", position):
                    position += 1
                found.append(".*" if position >= len(pattern) else "(.*/)?")
            else:
                found.append("[^/]*")
        elif character == "?":
            found.append("[^/]")
        elif character == "\\" and position < len(pattern):
            found.append(re.escape(pattern[position]))
            position += 1
        elif character == "[" and (closing := pattern.find("]", position + 1)) > 0:
            inner = pattern[position:closing].replace("[", "\\[").replace("&&", "&\\&").replace("||", "|\\|")
            found.append(f"(?![/])[{inner}]")
            position = closing + 1
        else:
            found.append(re.escape(character))
    try:
        return re.compile("".join(found), re.DOTALL)
    except re.error:
        # Such as a range that ends before it begins, which matches nothing in Go either.
        return re.compile(r"(?!)")


@dataclass(frozen=True)
class Ignore:
    """The rules of a .dockerignore, in order: (pattern, whether it includes again)."""

    rules: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Ignore:
        rules = []
        for number, line in enumerate(text.splitlines()):
            written = (line.removeprefix("\ufeff") if not number else line).rstrip("\r\n")
            if written.startswith("#"):
                continue
            pattern = written.strip()
            is_again = pattern.startswith("!")
            if is_again:
                pattern = pattern[1:].strip()
            if not pattern:
                continue
            pattern = posixpath.normpath(pattern)
            if len(pattern) > 1:
                pattern = pattern.lstrip("/")
            rules.append((pattern, is_again))
        return cls(tuple(rules))

    def excludes(self, path: str) -> bool:
        """Whether a file is left out of the build context. The last rule that matches it or a folder above decides."""
        parts = path.split("/")
        ways = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        excluded = False
        for pattern, is_again in self.rules:
            if excluded == is_again and any(matches(pattern, way) for way in ways):
                excluded = not is_again
        return excluded
