"""Text is typed as a terminal sends it, and no output of a program prevents the screen from being shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.tools.base import ToolError
from agent_runtime.tools.terminal import COLUMNS, ROWS, screen_of, typed


@pytest.mark.parametrize(
    ("text", "keys", "sent"),
    [
        ("ls\n", [], "ls\r"),
        ("", ["C-c"], "\x03"),
        ("", ["C-C", "C-["], "\x03\x1b"),
        (":q", ["Enter", "M-x", "y"], ":q\r\x1bxy"),
        ("", ["Up", "Escape"], "\x1b[A\x1b"),
    ],
)
def test_keys_are_sent_as_a_terminal_sends_them(text: str, keys: list[str], sent: str) -> None:
    assert typed(text, keys) == sent


def test_unknown_key_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ToolError, match=r"'Ctrl-C'.*C-c"):
        typed("", ["Ctrl-C"])


@given(
    st.lists(
        st.one_of(st.binary(), st.sampled_from([b"\x1b[", b"\x1b]", b"?", b"99999;1H", b"J", b"m", b">c", b"\x1b(0"]))
    )
)
def test_any_output_gives_a_screen(pieces: list[bytes]) -> None:
    lines = screen_of(b"".join(pieces)).split("\n")
    assert len(lines) <= ROWS


def test_overwritten_text_is_removed_and_the_last_lines_are_shown() -> None:
    assert screen_of(b"10%\r90%\r\n") == "90%"
    assert screen_of(b"".join(b"%d\r\n" % number for number in range(100))).split("\n")[0] == str(100 - ROWS + 1)
    assert max(map(len, screen_of(b"x" * 1000).split("\n"))) == COLUMNS
