"""Patterns of .dockerignore and of the sources of COPY."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.patterns import Ignore, matches


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a", "a", True),
        ("a", "b/a", False),
        ("*.py", "a.py", True),
        ("*.py", "b/a.py", False),
        ("?", "ab", False),
        ("[a-c]x", "bx", True),
        ("[^a]x", "bx", True),
        ("[^a]x", "ax", False),
        ("**/a", "a", True),
        ("**/a", "b/c/a", True),
        ("b/**", "b/c/a", True),
        ("b/**/a", "b/a", True),
        ("\\*", "*", True),
        ("\\*", "x", False),
        ("a.b", "aXb", False),
        ("[z-a]", "z", False),
    ],
)
def test_pattern(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) == expected


@pytest.mark.parametrize(
    ("rules", "excluded", "kept"),
    [
        ("# note\n\n*.log\n", ["a.log"], ["b/a.log", "a.txt", "# note"]),
        ("**/*.log", ["a.log", "b/a.log"], ["a.txt"]),
        ("folder", ["folder/a", "folder/b/c"], ["other/folder/a"]),
        ("/folder/", ["folder/a"], ["x"]),
        ("*\n!kept\n!src/**", ["a", "b/c"], ["kept", "src/x/y", "kept/below"]),
        ("a\n!a/b\n", ["a/c"], ["a/b", "a/b/c"]),
        ("!a\na", ["a"], []),
        ("../x\n.\n", [], ["x"]),
        ("  spaced  ", ["spaced"], []),
    ],
)
def test_dockerignore(rules: str, excluded: list[str], kept: list[str]) -> None:
    ignore = Ignore.parse(rules)
    assert [path for path in [*excluded, *kept] if ignore.excludes(path)] == excluded


@given(st.text(alphabet="ab*?[]!-^/\\.|&", max_size=20), st.text(alphabet="ab/.", max_size=20))
def test_any_pattern_can_be_matched(pattern: str, path: str) -> None:
    matches(pattern, path)
    Ignore.parse(pattern).excludes(path or "a")
