"""Patterns for files: .dockerignore and `--exclude` as moby/patternmatcher reads them, and COPY's as Go's filepath."""

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from agent_runtime.dockerfiles.glob import Step, folders, literal, many, matches_all, one
from agent_runtime.dockerfiles.instructions import Problem
from agent_runtime.dockerfiles.words import SPACES

_WILDCARDS: Final = "*?["


class PatternError(ValueError):
    """A pattern with a wrong character class or an escape without a character."""


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a whole path, as Go's `filepath.Match`: neither `*` nor `?` matches a slash.

    Raises PatternError.
    """
    fixed, *after_stars = _between_stars(pattern)
    at = len(fixed)
    if not matches_all(fixed, path[:at]):
        return False
    if not after_stars:
        return at == len(path)
    # Each part matches as early as possible, as in Go. That decides when a character class matches a slash.
    for part in after_stars[:-1]:
        while not matches_all(part, path[at : at + len(part)]):
            if path[at : at + 1] in ("", "/"):
                return False
            at += 1
        at += len(part)
    last = after_stars[-1]
    end = len(path) - len(last)
    return end >= at and "/" not in path[at:end] and matches_all(last, path[end:])


def has_wildcards(pattern: str) -> bool:
    """Return whether BuildKit searches for files that match a source of COPY, rather than for one path."""
    escaped = False
    for character in pattern:
        if not escaped and character in _WILDCARDS:
            return True
        escaped = not escaped and character == "\\"
    return False


@dataclass(frozen=True)
class _Rule:
    line: int
    includes: bool
    """Whether the pattern starts with `!`."""
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Ignore:
    """Patterns of excluded files. The last pattern that matches a path, or a folder above it, decides."""

    rules: tuple[_Rule, ...]
    problems: tuple[Problem, ...]
    """Patterns that BuildKit refuses; they have no effect here."""
    _by_folder: dict[str, tuple[bool, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> "Ignore":
        """Read a .dockerignore file."""
        return cls._of(_ignore_lines(text))

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "Ignore":
        """Read patterns of `--exclude`; the `line` of a problem is the number of the pattern, from 1."""
        return cls._of(enumerate(patterns, 1))

    @classmethod
    def _of(cls, patterns: Iterable[tuple[int, str]]) -> "Ignore":
        rules: list[_Rule] = []
        problems: list[Problem] = []
        for line, written in patterns:
            pattern = written.strip(SPACES)
            if not pattern:
                continue
            pattern = _clean(pattern)
            includes = pattern.startswith("!")
            pattern = pattern[includes:]
            try:
                if not pattern:
                    raise PatternError("'!' has no pattern; expected, for example, !README.md")
                rules.append(_Rule(line, includes, _ignore_steps(pattern)))
            except PatternError as error:
                problems.append(Problem(line, str(error)))
        return cls(tuple(rules), tuple(problems))

    def excludes(self, path: str) -> bool:
        """Return whether a path, relative to the context and with slashes, is excluded."""
        path = _clean(path).lstrip("/")
        if path == ".":
            return False
        return self._decide(path)[0]

    def _decide(self, path: str) -> tuple[bool, tuple[bool, ...]]:
        parent = posixpath.dirname(path)
        above = self._matched_folder(parent) if parent else (False,) * len(self.rules)
        excluded = False
        matched: list[bool] = []
        for rule, parent_matches in zip(self.rules, above, strict=True):
            # A rule that cannot change the result is not recorded as matched, as in moby/patternmatcher: below such a
            # folder it is evaluated again.
            match = parent_matches or (rule.includes == excluded and matches_all(rule.steps, path))
            matched.append(match)
            if match:
                excluded = not rule.includes
        return excluded, tuple(matched)

    def _matched_folder(self, path: str) -> tuple[bool, ...]:
        known = self._by_folder.get(path)
        if known is None:
            known = self._by_folder[path] = self._decide(path)[1]
        return known


def _ignore_lines(text: str) -> Iterator[tuple[int, str]]:
    for line, written in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if written.startswith("#"):
            continue
        pattern = written.strip(SPACES)
        exception = "!" if pattern.startswith("!") else ""
        pattern = pattern[len(exception) :].strip(SPACES)
        if pattern:
            pattern = _clean(pattern)
            if len(pattern) > 1:
                pattern = pattern.removeprefix("/")
        if exception or pattern:
            yield line, exception + pattern


def _clean(path: str) -> str:
    """Return the shortest equal path. Unlike Python, Go keeps no second leading slash."""
    cleaned = posixpath.normpath(path)
    return cleaned[1:] if cleaned.startswith("//") else cleaned


def _not_slash(character: str) -> bool:
    return character != "/"


def _anything(_: str) -> bool:
    return True


def _between_stars(pattern: str) -> list[list[Step]]:
    """Return the parts of a pattern that its stars separate. Each step of a part matches one character."""
    parts: list[list[Step]] = [[]]
    at = 0
    while at < len(pattern):
        if pattern[at] == "*":
            # Several stars are one.
            at += len(pattern[at:]) - len(pattern[at:].lstrip("*"))
            parts.append([])
        else:
            step, at = _single(pattern, at)
            parts[-1].append(step)
    return parts


def _ignore_steps(pattern: str) -> tuple[Step, ...]:
    """Return the steps of a .dockerignore pattern, in which `**` matches any number of folders."""
    steps: list[Step] = []
    at = 0
    wildcards = False
    starts_deep = False
    while at < len(pattern):
        if pattern.startswith("**", at):
            first = at == 0
            at += 2
            if pattern.startswith("/", at):
                at += 1
            if at == len(pattern):
                steps.append(many(_anything))
            else:
                steps.append(folders)
            if first:
                starts_deep = True
            else:
                wildcards = True
        elif pattern[at] == "*":
            steps.append(many(_not_slash))
            at += 1
            wildcards = True
        else:
            wildcards = wildcards or pattern[at] in "?[]\\"
            step, at = _single(pattern, at)
            steps.append(step)
    if starts_deep and not wildcards and not pattern.startswith("**/"):
        # moby compares the end of the path here: `**.py` excludes a.py, and `**foo` excludes a/barfoo too.
        steps[0] = many(_anything)
    return tuple(steps)


def _single(pattern: str, at: int) -> tuple[Step, int]:
    """Read the part of a pattern that matches one character."""
    character = pattern[at]
    if character == "?":
        return one(_not_slash), at + 1
    if character == "[":
        return _character_class(pattern, at + 1)
    if character == "\\":
        return literal(_escaped(pattern, at + 1)), at + 2
    return literal(character), at + 1


def _escaped(pattern: str, at: int) -> str:
    if at >= len(pattern):
        raise PatternError(f"the pattern {pattern!r} ends with '\\'; write '\\\\' for a backslash")
    return pattern[at]


def _character_class(pattern: str, at: int) -> tuple[Step, int]:
    def bound(at: int) -> tuple[str, int]:
        if at >= len(pattern) or pattern[at] in "-]":
            raise PatternError(
                f"the pattern {pattern!r} has a wrong or open character class; expected [abc], [a-z] or [^a-z]"
            )
        if pattern[at] == "\\":
            return _escaped(pattern, at + 1), at + 2
        return pattern[at], at + 1

    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[tuple[str, str]] = []
    while not (ranges and pattern.startswith("]", at)):
        low, at = bound(at)
        high = low
        if pattern.startswith("-", at):
            high, at = bound(at + 1)
        ranges.append((low, high))
    return one(lambda character: any(low <= character <= high for low, high in ranges) != negated), at + 1
