"""Parsing of requests from the network."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.http.messages import Reply, read_chunk_size, read_head


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    codes = []
    try:
        head = read_head(data.replace(b"\r\n\r\n", b""))
        head.body_length()
        head.segments()
        head.query()
    except ApiError as error:
        codes.append(error.code)
    assert codes in ([], ["BadRequest"])


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_names_with_slashes_and_any_character_stay_one_segment(names: list[str]) -> None:
    path = "/" + "/".join(quote(name, safe="") for name in names)
    assert read_head(f"GET {path} HTTP/1.1".encode()).segments() == names


@given(st.binary(min_size=1, max_size=50).filter(lambda name: b"\0" not in name))
def test_bytes_of_a_file_name_survive_the_query(name: bytes) -> None:
    head = read_head(b"GET /f?path=" + quote(name).encode() + b" HTTP/1.1")
    assert head.query()["path"][0].encode("utf-8", "surrogateescape") == name


@pytest.mark.parametrize(("line", "size"), [(b"0", 0), (b"1A", 26), (b"ff;name=value", 255), (b" 3 ", 3)])
def test_chunk_sizes_are_hexadecimal(line: bytes, size: int) -> None:
    assert read_chunk_size(line) == size


@pytest.mark.parametrize("line", [b"", b"-1", b"0x1", b"1_0", b"+1", b"g", b"f" * 16])
def test_a_chunk_size_of_any_other_form_is_refused(line: bytes) -> None:
    with pytest.raises(ApiError, match="hexadecimal"):
        read_chunk_size(line)


def test_last_reply_of_a_connection_is_marked() -> None:
    assert b"\r\nConnection: close\r\n" in Reply(b"x").encoded(keep_alive=False)
    assert b"Connection" not in Reply(b"x").encoded(keep_alive=True)
