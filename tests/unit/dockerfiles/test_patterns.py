"""Patterns of .dockerignore and COPY. The expectations were compared with moby/patternmatcher and Go's filepath."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.patterns import Ignore, PatternError, has_wildcards, matches


@pytest.mark.parametrize(
    ("patterns", "excluded", "included"),
    [
        ("a", ["a", "a/b"], ["b/a", "aa"]),
        ("/a/", ["a", "a/b/c"], ["b"]),
        ("*.py", ["x.py"], ["a/x.py"]),
        ("**/*.py", ["x.py", "a/b/x.py"], ["x.pyc"]),
        ("**/x", ["x", "a/x", "a/x/b"], ["ax"]),
        ("**x", ["x", "a/bx"], ["xa"]),
        ("a/**", ["a/b", "a/b/c"], ["a"]),
        ("a/**/b", ["a/b", "a/x/y/b"], ["a/xb"]),
        ("a?c", ["abc"], ["a/c", "ac"]),
        ("[a-c]x", ["ax"], ["dx"]),
        ("[^a]x", ["bx"], ["ax"]),
        ("*\n!README.md", ["a", "b/README.md"], ["README.md"]),
        ("a\n!a/b\na/b/c", ["a/x", "a/b/c"], ["a/b", "a/b/d"]),
        ("# c\n\n  a  \r\n", ["a"], ["# c"]),
        ("#a\n #b", ["#b"], ["#a"]),
        ("./a/../b", ["b"], ["a"]),
        ("\ufeffa", ["a"], []),
        ("*", ["a", "a/b"], ["."]),
        ("\\*", ["*"], ["a"]),
    ],
)
def test_ignore(patterns: str, excluded: list[str], included: list[str]) -> None:
    ignore = Ignore.parse(patterns)
    assert ignore.problems == ()
    assert [path for path in [*excluded, *included] if ignore.excludes(path)] == excluded


@pytest.mark.parametrize("pattern", ["!", "[a", "a\\", "[]"])
def test_wrong_ignore_pattern_is_a_problem(pattern: str) -> None:
    (problem,) = Ignore.parse(f"x\n{pattern}").problems
    assert problem.line == 2


def test_exclude_patterns_are_read_without_comments() -> None:
    ignore = Ignore.of(["#a", "*.md"])
    assert ignore.excludes("#a")
    assert ignore.excludes("b.md")


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a", "a", True),
        ("*", "a/b", False),
        ("a*/b", "abc/b", True),
        ("a*", "a", True),
        ("*b*d", "abcd", True),
        ("*b*d", "abcde", False),
        ("?", "/", False),
        ("[a-c]", "b", True),
        ("[^a-c]", "b", False),
        ("[\\-x]", "-", True),
        ("\\*", "*", True),
        ("a[^b]c", "a/c", True),
        ("*[^a]*", "x/y", False),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_matches(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@pytest.mark.parametrize("pattern", ["[", "[a", "[]", "[a-", "[-a]", "a\\"])
def test_wrong_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        matches(pattern, "a")


@pytest.mark.parametrize(
    ("pattern", "expected"), [("a", False), ("a*", True), ("\\*", False), ("[a]", True), ("\\\\?", True)]
)
def test_has_wildcards(pattern: str, expected: bool) -> None:
    assert has_wildcards(pattern) is expected


def test_many_wildcards_take_little_time() -> None:
    path = "a" * 200
    assert not Ignore.parse("a*" * 50 + "b\n" + "**/a" * 50 + "b").excludes(path)
    assert not matches("a*" * 50 + "b", path)


@given(st.text("ab*?[]^-!\\/.# \n"), st.lists(st.sampled_from(["a", "b", "ab", "."]), min_size=1, max_size=4))
def test_any_ignore_file_is_read(text: str, parts: list[str]) -> None:
    assert Ignore.parse(text).excludes("/".join(parts)) in (True, False)
