"""A program's request as its runner gets it: the same request, in an unambiguous form."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_runtime.executor.attempts import Hold
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.http.messages import read_head
from agent_runtime.executor.network import model_port
from agent_runtime.executor.network.model_port import (
    SMALL_BODY_BYTES,
    Exchange,
    HeldBody,
    ModelPort,
    RunnerConnection,
    forwarded_head,
)

TOKEN = st.text("!#$%&'*+.^_`|~-09azAZ", min_size=1, max_size=12)
TRICKY_NAMES = st.sampled_from(
    [
        "X-Stainless-Retry-Count",
        "Transfer-Encoding",
        "content-length",
        "Connection",
        "Upgrade",
        "TE",
        "Expect",
        "Idempotency-Key",
        "HOST",
    ]
)
TRICKY_VALUES = st.sampled_from(
    ["chunked", "5", "0", "close, X-Token", "100-continue", "a\r\nContent-Length: 9", "\x0bchunked"]
)
HEADERS = st.lists(
    st.tuples(TOKEN | TRICKY_NAMES, TRICKY_VALUES | st.text(st.characters(max_codepoint=255), max_size=20)), max_size=6
)


@given(method=TOKEN, target=st.text(st.characters(min_codepoint=33, max_codepoint=126)), headers=HEADERS)
def test_a_request_cannot_carry_a_second_one_past_the_model_port(
    method: str, target: str, headers: list[tuple[str, str]]
) -> None:
    lines = [f"{method} /{target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    try:
        head = read_head("\r\n".join(lines).encode("latin-1"))
    except ApiError:
        assume(False)
    data = forwarded_head(head, 17, "ours")
    assert data.count(b"\r\n\r\n") == 1
    again = read_head(data.removesuffix(b"\r\n\r\n"))
    assert (again.method, again.target, again.version) == (head.method, head.target, head.version)
    assert again.body_length() == 17
    assert not again.keep_alive
    is_retry = head.headers.get("x-stainless-retry-count", "0") != "0"
    assert again.headers.get("idempotency-key") == head.headers.get("idempotency-key", None if is_retry else "ours")
    own = {"connection", "content-length"} | ({"idempotency-key"} & again.headers.keys())
    dropped = {"transfer-encoding", "upgrade", "te", "expect"}
    assert again.headers.keys() == (head.headers.keys() - dropped) | own
    for name in head.headers.keys() - dropped - own:
        assert again.headers[name] == head.headers[name].strip(" \t")


@given(pieces=st.lists(st.binary(max_size=40_000), max_size=6))
def test_a_body_that_is_sent_again_is_the_same_body(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("held")
    body = HeldBody(str(folder))
    for piece in pieces:
        body.add(piece)
    assert list(folder.iterdir()) == []
    for _ in range(2):
        assert b"".join(body.pieces()) == b"".join(pieces)
    assert body.size == len(b"".join(pieces))
    body.close()


def test_full_disk_is_detected_while_the_program_can_get_the_error() -> None:
    body = HeldBody("/proc/1")
    body.add(b"x" * SMALL_BODY_BYTES)
    with pytest.raises(OSError, match="/proc/1"):
        body.add(b"x")
    body.close()


async def test_a_connection_that_comes_just_when_a_program_gives_up_serves_the_next_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = ModelPort(listener, str(tmp_path))
        gone, next_one = (asyncio.create_task(port.free_connection(is_repeated=False)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        port.admit(connection := RunnerConnection(port, Hold(1, "runner")))
        assert await next_one is connection
        late = asyncio.create_task(port.free_connection(is_repeated=False))
        await asyncio.sleep(0)
        port.admit(connection := RunnerConnection(port, Hold(1, "runner")))
        late.cancel()
        await asyncio.gather(gone, late, return_exceptions=True)
        assert await port.free_connection(is_repeated=False) is connection
    assert port.describe()["waiting"] == 0


@pytest.mark.parametrize(("absent", "served", "missed"), [(0.0, False, 1), (0.0, True, 0), (60.0, False, 0)])
async def test_requests_that_end_without_a_runner_are_counted_as_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: float, served: bool, missed: int
) -> None:
    monkeypatch.setattr(model_port, "ABSENT_SECONDS", absent)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = ModelPort(listener, str(tmp_path))
        if served:
            port.admit(RunnerConnection(port, Hold(1, "runner")))
        await Exchange(port, b"", HeldBody(str(tmp_path))).aclose()
        assert port.describe()["missed"] == missed
