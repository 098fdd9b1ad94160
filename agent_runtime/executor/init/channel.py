"""Numbered messages over a sequenced-packet socket pair, between the executor, the zygote and the init processes of
workspaces.

A message is one JSON object, split into packets. Only a request to start a command is not JSON, so that C (subreaper.c)
can read it too. Each packet has the number of its request, so several processes, such as init's children, can answer
over one socket at once. Descriptors travel with a message's last packet. Messages from a workspace are untrusted and
limited: a message over a limit raises ProtocolError and never uses unbounded memory.

The strings of a start request end with NUL, in this order: user and folder (empty: the workspace's defaults); `program`
or `shell`, followed by ` terminal` if the command gets one, and by ` bounded` if it gains no rights; the number of
arguments; the arguments; NAME=VALUE for each variable that the request adds to the workspace's environment. Programs
cannot receive a NUL, so no string has one.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The kernel allocates packets below 32 KiB in one piece.
_CHUNK_BYTES = 30_000
# The largest request is a command's argv and environment, for which Linux allows 2 MiB; JSON may escape each byte in 6.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# Most incomplete messages of one peer; more indicate an attack.
_MAX_UNFINISHED = 1024
_MAX_DESCRIPTORS = 8
_HEADER = struct.Struct("=?I")
HEADER_BYTES = _HEADER.size
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
# Plain integers, because the enumeration's operators are slow and run for every packet.
_CLOSE_ON_EXEC, _CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_decode = json.JSONDecoder().decode

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side sent an invalid message."""


def encode(message: Message) -> bytes:
    return json.dumps(message).encode("ascii")


def decode(content: bytes) -> Message:
    """Parse a message. Raises ProtocolError."""
    try:
        message = _decode(content.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a JSON object expected")
    return message


def packets(number: int, content: bytes) -> list[bytes]:
    """Return the packets of one message of request `number` (0 … 2**32-1)."""
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(content)} bytes: at most {MAX_MESSAGE_BYTES} can be sent")
    if len(content) <= _CHUNK_BYTES:
        return [_HEADER.pack(True, number) + content]
    starts = range(0, len(content), _CHUNK_BYTES)
    return [_HEADER.pack(start == starts[-1], number) + content[start : start + _CHUNK_BYTES] for start in starts]


class Assembler:
    """Assembles packets into messages."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max = max_message_bytes
        self._unfinished: dict[int, list[bytes]] = {}
        self._held = 0

    def add(self, packet: bytes) -> tuple[int, bytes] | None:
        """Return the request's number and the message's content if this packet was its last. Raises ProtocolError."""
        if len(packet) < _HEADER.size:
            raise ProtocolError(f"packet of {len(packet)} bytes: at least {_HEADER.size} expected")
        last, number = _HEADER.unpack_from(packet)
        if last and number not in self._unfinished:
            return number, packet[_HEADER.size :]
        parts = self._unfinished.setdefault(number, [])
        parts.append(packet[_HEADER.size :])
        self._held += len(packet)
        if self._held > self._max or len(self._unfinished) > _MAX_UNFINISHED:
            raise ProtocolError(f"unfinished messages of more than {self._max} bytes")
        if not last:
            return None
        content = b"".join(self._unfinished.pop(number))
        self._held -= len(content) + len(parts) * _HEADER.size
        return number, content


def receive_packet(end: socket.socket) -> tuple[bytes, list[int]]:
    """Return one packet and its descriptors. An empty packet is the end of the connection."""
    packet, ancillary, flags, _ = end.recvmsg(_CHUNK_BYTES + _HEADER.size, _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
    if not ancillary and not flags & _CUT:
        return packet, []
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & _CUT:
        close_all(descriptors)
        raise ProtocolError("packet larger than the limit")
    return packet, list(descriptors)


def send_packet(end: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    if descriptors:
        end.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    else:
        end.send(packet)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Channel:
    """The blocking side of a channel, used by the zygote and the inits."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._assembler = Assembler()

    def receive(self) -> tuple[int, Message, list[int]] | None:
        """Return the next message with its descriptors; None if the other side has closed."""
        received = self.receive_content()
        return received and (received[0], decode(received[1]), received[2])

    def receive_content(self) -> tuple[int, bytes, list[int]] | None:
        """Like `receive`, for content that is not JSON."""
        while True:
            try:
                packet, descriptors = receive_packet(self.end)
            except ConnectionError:
                return None
            if not packet:
                return None
            whole = self._assembler.add(packet)
            if whole is not None:
                return *whole, descriptors

    def send(self, number: int, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message of request `number`; False if the other side has closed, which `receive` detects too."""
        *first, last = packets(number, encode(message))
        try:
            for packet in first:
                send_packet(self.end, packet)
            send_packet(self.end, last, descriptors)
        except ConnectionError:
            return False
        return True


class StartRequest(NamedTuple):
    """`argv` is a program with its arguments, or text for the shell. None as user or folder means the workspace's
    default.
    """

    argv: Sequence[str] | str
    env: Mapping[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    tty: bool = False
    bounded: bool = False
    """Neither the command nor what it starts gains rights by the programs that it executes, such as `sudo`."""

    def pack(self) -> bytes:
        """Return the packed strings. All must be encodable, and none may contain NUL."""
        arguments = [self.argv] if isinstance(self.argv, str) else self.argv
        kind = "shell" if isinstance(self.argv, str) else "program"
        kind += " terminal" * self.tty + " bounded" * self.bounded
        variables = [f"{name}={value}" for name, value in self.env.items()]
        strings = [self.user or "", self.cwd or "", kind, str(len(arguments)), *arguments, *variables, ""]
        return "\0".join(strings).encode("utf-8", "surrogateescape")


def unpack(content: bytes) -> StartRequest:
    """Return the unpacked request."""
    user, cwd, kind, count, *rest = content.decode("utf-8", "surrogateescape").split("\0")[:-1]
    arguments, variables = rest[: int(count)], rest[int(count) :]
    env = dict(variable.split("=", 1) for variable in variables)
    how, *marks = kind.split(" ")
    argv = arguments[0] if how == "shell" else arguments
    return StartRequest(argv, env, cwd or None, user or None, "terminal" in marks, "bounded" in marks)
