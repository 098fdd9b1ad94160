"""Requests and replies, whatever carries them: a socket, or an executor's model port."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

JSON_HEADERS: Mapping[str, str] = {"Content-Type": "application/json"}
EVENT_STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back otherwise
}


class BodyTooLarge(Exception):
    """The request's body has more bytes than asked for."""


@dataclass(slots=True)
class Incoming:
    """A request."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    read: Callable[[int], Awaitable[bytes]]
    """The body, of at most so many bytes. Raises BodyTooLarge. May be called again, and gives the same."""
    query: str = ""


def _nothing(delivered: bool) -> None:
    pass


@dataclass(slots=True)
class Reply:
    """A reply. Whoever carries it calls `done` once: with True when its last byte was handed to the client's connection,
    with False when that is gone."""

    status: int
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]
    done: Callable[[bool], None] = field(default=_nothing)


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, {**JSON_HEADERS, **(headers or {})}, json_body(body))


def json_body(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def request_key(headers: Mapping[str, str]) -> str | None:
    """The key of a request: a bearer token, the password of Basic (which is how a URL carries a key), `x-api-key` or
    `api-key`. The headers' names are in lower case, or found in any case."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(token, validate=True).decode().partition(":")[2] or None
    return headers.get("x-api-key") or headers.get("api-key") or None
