"""Messages between the executor and untrusted processes."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.init.channel import (
    Assembler,
    Channel,
    ProtocolError,
    StartRequest,
    decode,
    encode,
    packets,
    unpack,
)

_text = st.text(st.characters(), max_size=40) | st.binary(max_size=20).map(os.fsdecode)
_values = st.recursive(st.none() | st.booleans() | st.integers() | _text, lambda inner: st.lists(inner, max_size=4))
_messages = st.dictionaries(_text, _values, max_size=5)


@given(st.lists(_messages, max_size=6), st.randoms())
def test_messages_with_interleaved_packets_arrive_complete(
    messages: list[dict[str, Any]], order: random.Random
) -> None:
    """Several processes of a workspace answer over one socket at once."""
    queues = [packets(number, encode({**message, "pad": "x" * 70_000})) for number, message in enumerate(messages)]
    assembler, got = Assembler(), {}
    while any(queues):
        whole = assembler.add(order.choice([queue for queue in queues if queue]).pop(0))
        if whole is not None:
            got[whole[0]] = decode(whole[1])
    assert got == {number: {**message, "pad": "x" * 70_000} for number, message in enumerate(messages)}


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_arbitrary_packets_are_decoded_or_refused(garbage: list[bytes]) -> None:
    assembler = Assembler(max_message_bytes=1000)
    for packet in garbage:
        try:
            whole = assembler.add(packet)
            message = whole and decode(whole[1])
        except ProtocolError:
            continue
        assert message is None or isinstance(message, dict)


def test_a_message_that_never_ends_does_not_fill_the_executors_memory() -> None:
    assembler = Assembler(max_message_bytes=100_000)
    first = packets(1, encode({"pad": "x" * 50_000}))[0]
    assembler.add(first)
    assembler.add(first)
    assembler.add(first)
    with pytest.raises(ProtocolError, match="unfinished"):
        assembler.add(first)


def test_a_thousand_messages_that_never_end_are_too_many() -> None:
    assembler = Assembler()
    for number in range(1024):
        assembler.add(b"\x00" + number.to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="unfinished"):
        assembler.add(b"\x00" + (2000).to_bytes(4, "little"))


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not JSON"):
        decode(b"[" * 20_000)


def test_descriptors_travel_with_their_message() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        readable, writable = os.pipe()
        Channel(ours).send(7, {"pad": "x" * 100_000}, [writable])
        os.close(writable)
        received = Channel(theirs).receive()
        assert received is not None
        number, message, (descriptor,) = received
        assert (number, len(message["pad"])) == (7, 100_000)
        os.write(descriptor, b"through")
        os.close(descriptor)
        assert os.read(readable, 10) == b"through"
        os.close(readable)
        ours.close()
        assert Channel(theirs).receive() is None


_plain = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.binary(
    max_size=9
).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
_named = st.none() | _plain.filter(bool)


@given(
    st.lists(_plain, min_size=1, max_size=5) | _plain,
    st.dictionaries(_plain.filter(lambda name: bool(name) and "=" not in name), _plain, max_size=4),
    _named,
    _named,
    st.booleans(),
    st.booleans(),
)
def test_a_packed_command_unpacks_to_itself(
    argv: list[str] | str, env: dict[str, str], cwd: str | None, user: str | None, tty: bool, bounded: bool
) -> None:
    request = StartRequest(argv, env, cwd, user, tty, bounded)
    assert unpack(request.pack()) == request
