"""Expansion of variables. The expectations were compared with BuildKit 0.34's own lexer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.words import WordError, expand, expand_heredoc, split_words

VARIABLES = {"x": "abcabc", "empty": "", "path": "a/b/c.tar.gz", "spaces": "a b  c"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$x-${x}", "abcabc-abcabc"),
        ("$unset.", "."),
        ("$", "$"),
        ("a $ b", "a $ b"),
        ("'$x'", "$x"),
        ("\"$x 'q'\"", "abcabc 'q'"),
        ("\\$x", "$x"),
        ('"\\$x \\n \\" \\\\"', '$x \\n " \\'),
        ("a\\ b\\", "a b"),
        ("${unset:-d}${empty:-d}${empty-d}${x:-d}", "ddabcabc"),
        ("${unset-${x}}", "abcabc"),
        ("${x:+y}${empty:+y}${empty+y}${unset+y}", "yy"),
        ("${x:?needed}${x?needed}${empty?needed}", "abcabcabcabc"),
        ("${path#*/}", "b/c.tar.gz"),
        ("${path##*/}", "c.tar.gz"),
        ("${path%.*}", "a/b/c.tar"),
        ("${path%%.*}", "a/b/c"),
        ("${path##*\\/}", "c.tar.gz"),
        ("${x#?}", "bcabc"),
        ("${x#z}", "abcabc"),
        ("${x/b/-}", "a-cabc"),
        ("${x//b/-}", "a-ca-c"),
        ("${x/b*/}", "a"),
        ("${path//\\//_}", "a_b_c.tar.gz"),
        ("${unset/a/b}", ""),
        ("$1$@", ""),
    ],
)
def test_expand(word: str, expected: str) -> None:
    assert expand(word, VARIABLES) == expected


def test_expand_uses_the_escape_of_the_directive() -> None:
    assert expand("`$x \\$x", VARIABLES, "`") == "$x \\abcabc"


@pytest.mark.parametrize(
    "word", ["'a", '"a', "${x", "${", "${}", "${:x}", "${x:a}", "${x:#a}", "${x^}", "${x/a", "${x#\\a}", "${x:-${y}"]
)
def test_wrong_words_are_refused(word: str) -> None:
    with pytest.raises(WordError):
        expand(word, VARIABLES)


def test_required_variables_have_their_message() -> None:
    with pytest.raises(WordError, match="empty: needed"):
        expand("${empty:?needed}", VARIABLES)
    with pytest.raises(WordError, match="unset: is not allowed to be unset"):
        expand("${unset?}", VARIABLES)


def test_nesting_is_limited() -> None:
    with pytest.raises(WordError, match="nested"):
        expand("${u:-" * 5000, {})


def test_many_wildcards_take_little_time() -> None:
    assert expand("${v##" + "*a" * 50 + "b}", {"v": "a" * 2000}) == "a" * 2000


def test_length_of_the_expanded_text_is_limited() -> None:
    value = "a" * (1 << 20)
    with pytest.raises(WordError, match="longer than"):
        expand("$v" * 1000, {"v": value})
    with pytest.raises(WordError, match="longer than"):
        expand('"' + "$v" * 1000 + '"', {"v": value})


@pytest.mark.parametrize("word", ["${v//*b/}", "${v/?/}", "${v##*a*b}"])
def test_long_values_in_patterns_are_refused(word: str) -> None:
    with pytest.raises(WordError, match="too long"):
        expand(word, {"v": "a" * (4 << 20)})


def test_expand_heredoc_keeps_quotes() -> None:
    assert expand_heredoc("'$x' \"$x\" \\$x\n", VARIABLES) == "'abcabc' \"abcabc\" $x\n"


def test_split_words_keeps_variables_and_raw_parts() -> None:
    assert split_words("a '$x b' \\$y <<  E", raw_quotes=True, raw_escapes=True) == ["a", "'$x b'", "\\$y", "<<  E"]


@given(st.text("ab$x{}:-+?#%/\\'\" <*"))
def test_words_expand_or_are_refused(word: str) -> None:
    try:
        expand(word, VARIABLES)
        expand_heredoc(word, VARIABLES)
    except WordError:
        pass
