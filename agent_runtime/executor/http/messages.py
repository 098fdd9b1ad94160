"""HTTP/1.1 messages: parses a request's head and formats a reply's. Pure; `server` transfers the bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote

from agent_runtime.executor.errors import STATUS_OF_CODE, ApiError, bad_request

# The limit of nginx. The largest legitimate head here, with a percent-encoded path of 4 KiB, needs less than half of
# it.
MAX_HEAD_BYTES = 32 * 1024
# A chunk-size line has a hexadecimal number; extensions, which clients do not send, must fit into the rest.
MAX_CHUNK_LINE_BYTES = 256

_encode = json.JSONEncoder(separators=(",", ":")).encode
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rf"({_NAME}) ([^ \r\n\0]*) (HTTP/1\.[01])")
_HEADER_LINE = re.compile(rf"({_NAME}):[ \t]*([^\r\n\0]*)")
_REASONS = {status: HTTPStatus(status).phrase for status in (200, *STATUS_OF_CODE.values())}
# These headers may occur only once: duplicates allow request smuggling past a server that reads the other one.
_SINGLE = frozenset(
    {"content-length", "transfer-encoding", "authorization", "idempotency-key", "rollout-attempt", "rollout-fence"}
)


@dataclass
class Head:
    """A request's head. Header names are in lower case; `target` is unchanged."""

    method: str
    target: str
    version: str
    headers: dict[str, str]
    keep_alive: bool

    def __post_init__(self) -> None:
        path, _, self.query_string = self.target.partition("?")
        self.path = path

    def segments(self) -> list[str]:
        """Return the path's parts, decoded separately, so that an encoded slash stays within its part."""
        parts = self.path.lstrip("/").split("/")
        return [_decoded(part) for part in parts] if "%" in self.path else parts

    def query(self) -> dict[str, list[str]]:
        """Return the query's values by name. File names that are not UTF-8 are encoded for os.fsencode."""
        values: dict[str, list[str]] = {}
        try:
            pairs = parse_qsl(self.query_string, keep_blank_values=True, errors="surrogateescape", max_num_fields=1000)
        except ValueError:
            raise bad_request("query: more than 1000 fields") from None
        for name, value in pairs:
            values.setdefault(name, []).append(value)
        return values

    def body_length(self) -> int | None:
        """Return the length of the body; None for a chunked one. Raises BadRequest."""
        length = self.headers.get("content-length")
        coding = self.headers.get("transfer-encoding")
        if coding is not None:
            if length is not None:
                raise bad_request("Content-Length and Transfer-Encoding: give one of them")
            if coding.lower() != "chunked":
                raise bad_request(f"Transfer-Encoding: 'chunked' expected, got {coding!r}")
            return None
        if length is None:
            return 0
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise bad_request(f"Content-Length: a whole number of bytes expected, got {length!r}")
        return int(length)


def read_head(data: bytes) -> Head:
    """Parse a head without its final empty line. Raises BadRequest."""
    first, *lines = data.decode("latin-1").split("\r\n")
    request_line = _REQUEST_LINE.fullmatch(first)
    if request_line is None:
        raise bad_request(f"request line: 'METHOD /path HTTP/1.1' expected, got {first[:100]!r}")
    method, target, version = request_line.groups()
    if not target.startswith("/") or not target.isascii():
        raise bad_request(f"request target: an absolute, percent-encoded path expected, got {target[:100]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header_line = _HEADER_LINE.fullmatch(line)
        if header_line is None:
            raise bad_request(f"header line: 'Name: value' expected, got {line[:100]!r}")
        name, value = header_line.groups()
        name = name.lower()
        if name in headers and name in _SINGLE:
            raise bad_request(f"{name}: given twice")
        value = value.rstrip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
    return Head(method, target, version, headers, keep_alive)


def read_chunk_size(line: bytes) -> int:
    """Return the size in a chunk's first line. Raises BadRequest."""
    digits = line.partition(b";")[0].strip()
    if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
        raise bad_request(f"chunked body: a chunk's size in hexadecimal expected, got {line[:40]!r}")
    return int(digits, 16)


class Reply(NamedTuple):
    """A complete reply."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = MappingProxyType({})

    def encoded(self, keep_alive: bool) -> bytes:
        return _head(self.status, self.content_type, self.headers, f"Content-Length: {len(self.body)}", keep_alive) + (
            self.body
        )


class Chunks(Protocol):
    """A body in pieces. `aclose` is always called, even if no piece was taken."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class StreamedReply:
    """A reply of unknown length. An ApiError that `chunks` raises replaces the next chunk's size and ends the
    connection, so that no client takes the reply for complete, and ours learns the reason.
    """

    chunks: Chunks
    content_type: str = "application/octet-stream"

    def head(self, keep_alive: bool) -> bytes:
        return _head(200, self.content_type, {}, "Transfer-Encoding: chunked", keep_alive)


@dataclass(frozen=True)
class PassedReply:
    """A reply of another server, with its head. Its end is the end of the connection.

    `stall_seconds` is the time limit for a client that does not read it. An ApiError that `chunks` raises closes the
    connection.
    """

    chunks: Chunks
    stall_seconds: float


@dataclass(frozen=True)
class Switched:
    """The reply that ends HTTP on its connection and hands it to `protocol`."""

    upgrade: str
    protocol: asyncio.Protocol

    def head(self) -> bytes:
        return f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {self.upgrade}\r\n\r\n".encode()


def json_reply(value: Any) -> Reply:
    """Return a reply with this value."""
    return Reply(_encode(value).encode())


def error_reply(error: ApiError) -> Reply:
    """Return the reply to a refused request."""
    return Reply(_encode(error.body()).encode(), error.status)


def failed_chunk(error: ApiError) -> bytes:
    """Return the end of a streamed reply that cannot be completed."""
    return f"error {_encode(error.body())}\r\n".encode()


def _head(status: int, content_type: str, headers: Mapping[str, str], framing: str, keep_alive: bool) -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n{framing}\r\n"
    for name, value in headers.items():
        head += f"{name}: {value}\r\n"
    if not keep_alive:
        head += "Connection: close\r\n"
    return f"{head}\r\n".encode("latin-1")


def _decoded(part: str) -> str:
    return unquote(part, errors="surrogateescape")
