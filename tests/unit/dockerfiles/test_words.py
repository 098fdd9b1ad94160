"""Quotes, escapes and variables in words of a Dockerfile."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.words import WordError, expand

KNOWN = {"a": "1", "empty": "", "path": "/x/y/z.tar.gz", "long_name": "2"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("plain", "plain"),
        ("$a", "1"),
        ("${a}b", "1b"),
        ("$ab", ""),
        ("$long_name-x", "2-x"),
        ("\\$a", "$a"),
        ("'$a'", "$a"),
        ('"$a b"', "1 b"),
        ('"\\"\\$\\x"', '"$\\x'),
        ("a\\ b", "a b"),
        ("'it'\"s\"", "its"),
        ("$", "$"),
        ("a$", "a$"),
        ("$1x", "x"),
        ("${none:-word}", "word"),
        ("${empty:-word}", "word"),
        ("${empty-word}", ""),
        ("${none-$a}", "1"),
        ("${a:+set}", "set"),
        ("${none:+set}", ""),
        ("${empty+set}", "set"),
        ("${none:-${other:-deep}}", "deep"),
        ('${none:-"a b"}', "a b"),
        ("${path#*/}", "x/y/z.tar.gz"),
        ("${path##*/}", "z.tar.gz"),
        ("${path%.*}", "/x/y/z.tar"),
        ("${path%%.*}", "/x/y/z"),
        ("${path/y/Y}", "/x/Y/z.tar.gz"),
        ("${path//\\//_}", "_x_y_z.tar.gz"),
        ("${a:?needed}", "1"),
    ],
)
def test_word(word: str, expected: str) -> None:
    assert expand(word, KNOWN) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("'a", "closing '"),
        ('"a', 'closing "'),
        ("${a", "'}' is missing|not supported"),
        ("${}", "name is missing"),
        ("${none:?is needed}", "none: is needed"),
    ],
)
def test_word_that_cannot_be_read(word: str, message: str) -> None:
    with pytest.raises(WordError, match=message):
        expand(word, KNOWN)


@given(st.text(alphabet="ab$\\{}'\"`:-+#%/?* ", max_size=40))
def test_any_word_is_expanded_or_refused(word: str) -> None:
    with contextlib.suppress(WordError):
        expand(word, KNOWN)


@given(st.text(max_size=40))
def test_quoted_text_is_kept(text: str) -> None:
    assert expand("'" + text.replace("'", "") + "'", KNOWN) == text.replace("'", "")
