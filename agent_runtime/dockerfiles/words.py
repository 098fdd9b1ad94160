"""Words of a Dockerfile: quotes, escapes and variables, as BuildKit's shell lexer replaces them. Pure.

Reference: https://docs.docker.com/reference/dockerfile/#environment-replacement
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#]")
_DEEPEST = 64


class WordError(Exception):
    """A word that cannot be read; the message says why."""


def expand(word: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """Return the word without quotes and with its variables replaced. Raises WordError."""
    return _Lexer(word, variables, escape, 0).until("")[0]


class _Lexer:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise WordError("variables are nested too deep")
        self._text, self._variables, self._escape, self._depth = text, variables, escape, depth
        self._position = 0

    def until(self, end: str) -> tuple[str, int]:
        """Return the text up to an unquoted `end`, and the position after it."""
        found: list[str] = []
        while self._position < len(self._text):
            character = self._text[self._position]
            if end and character == end:
                self._position += 1
                return "".join(found), self._position
            if character == "'":
                found.append(self._single())
            elif character == '"':
                found.append(self._double())
            elif character == "$":
                found.append(self._variable())
            elif character == self._escape:
                # An escape at the end of the word is dropped.
                found.append(self._text[self._position + 1 : self._position + 2])
                self._position += 2
            else:
                found.append(character)
                self._position += 1
        if end:
            raise WordError(f"a {end!r} is missing")
        return "".join(found), self._position

    def _single(self) -> str:
        closing = self._text.find("'", self._position + 1)
        if closing < 0:
            raise WordError("a closing ' is missing")
        text, self._position = self._text[self._position + 1 : closing], closing + 1
        return text

    def _double(self) -> str:
        self._position += 1
        found: list[str] = []
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == '"':
                self._position += 1
                return "".join(found)
            if character == "$":
                found.append(self._variable())
                continue
            if character == self._escape:
                following = self._text[self._position + 1 : self._position + 2]
                if following in ('"', "$", self._escape) and following:
                    found.append(following)
                    self._position += 2
                    continue
            found.append(character)
            self._position += 1
        raise WordError('a closing " is missing')

    def _variable(self) -> str:
        self._position += 1
        if self._text[self._position : self._position + 1] == "{":
            self._position += 1
            return self._braced()
        name = _NAME.match(self._text, self._position)
        if name is None:
            return "$"
        # A digit or sign is a name of one character.
        size = len(name[0]) if name[0][0].isalpha() or name[0][0] == "_" else 1
        self._position += size
        return self._variables.get(name[0][:size], "")

    def _braced(self) -> str:
        name = _NAME.match(self._text, self._position)
        if name is None:
            raise WordError("a variable's name is missing after ${")
        self._position = name.end()
        value = self._variables.get(name[0])
        operator = self._text[self._position : self._position + 1]
        if operator == "}":
            self._position += 1
            return value or ""
        self._position += 1
        if operator == ":":
            kind = self._text[self._position : self._position + 1]
            self._position += 1
            return self._chosen(name[0], kind, value or None)
        if operator in ("-", "+", "?"):
            return self._chosen(name[0], operator, value)
        if operator in ("#", "%"):
            is_longest = self._text[self._position : self._position + 1] == operator
            self._position += is_longest
            return _trimmed(value or "", self._argument(), from_end=operator == "%", is_longest=is_longest)
        if operator == "/":
            is_every = self._text[self._position : self._position + 1] == "/"
            self._position += is_every
            return self._replaced(value or "", is_every=is_every)
        raise WordError(f"${{{name[0]}{operator}…}} is not supported")

    def _chosen(self, name: str, kind: str, value: str | None) -> str:
        argument = self._argument()
        if kind == "-":
            return argument if value is None else value
        if kind == "+":
            return "" if value is None else argument
        if kind == "?":
            if value is None:
                raise WordError(f"{name}: {argument or 'it is not set'}")
            return value
        raise WordError(f"${{{name}:{kind}…}} is not supported")

    def _argument(self) -> str:
        inner = _Lexer(self._text[self._position :], self._variables, self._escape, self._depth + 1)
        text, used = inner.until("}")
        self._position += used
        return text

    def _replaced(self, value: str, *, is_every: bool) -> str:
        inner = _Lexer(self._text[self._position :], self._variables, self._escape, self._depth + 1)
        pattern, used = inner.until("/")
        self._position += used
        replacement = self._argument()
        return re.sub(_pattern(pattern), lambda _: replacement, value, count=0 if is_every else 1)


def _pattern(glob: str) -> str:
    """Return a regular expression that finds a shell pattern anywhere."""
    return fnmatch.translate(glob).removeprefix("(?s:").removesuffix(r")\Z")


def _trimmed(value: str, glob: str, *, from_end: bool, is_longest: bool) -> str:
    sizes = range(len(value) + 1) if not is_longest else range(len(value), -1, -1)
    for size in sizes:
        if fnmatch.fnmatchcase(value[len(value) - size :] if from_end else value[:size], glob):
            return value[: len(value) - size] if from_end else value[size:]
    return value
