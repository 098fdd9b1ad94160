"""Requests and replies, whatever carries them (a socket, an executor's model port), and what a path asks for."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.proxy.keys import session_of

JSON_HEADERS: Mapping[str, str] = {"Content-Type": "application/json"}
EVENT_STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back otherwise
}


class BodyTooLarge(Exception):
    """The request's body has more bytes than may be read; the message says how many may be."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the body has more than the {most} bytes that a request may have here")


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


CHAT_PATH = "/chat/completions"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A call of a public API."""

    api: str
    """Path below the base URL: `/chat/completions`."""
    session: str | None = None
    """Given by name; the key comes in a header."""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class SessionPath:
    """`/sessions/{session}` and what is below it."""

    session: str
    action: str
    """Empty, `complete` or `traces`."""


@dataclass(frozen=True, slots=True)
class TurnPath:
    """`/sessions/{session}/turns/{turn}`: one replica tells another what became of a reply."""

    session: str
    turn: int


@dataclass(frozen=True, slots=True)
class PlainPath:
    """A path that belongs to no session."""

    name: str
    """`health` or `metrics`."""


Target = ApiCall | SessionPath | TurnPath | PlainPath


def whole_number(text: str) -> int | None:
    """The number that a client wrote in at most 9 digits. Python refuses to convert more than 4,300."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


def target_of(path: str) -> Target | None:
    match path.split("/")[1:]:
        case ["health" | "metrics" as name]:
            return PlainPath(name)
        case ["v1", "chat", "completions", session] if session:
            return ApiCall(CHAT_PATH, session=session)
        case ["v1", *api] if api:
            return ApiCall("/" + "/".join(api))
        case ["sessions", session, "v1", *api] if session and api:
            return ApiCall("/" + "/".join(api), session=session)
        case ["sessions", session, "complete" | "traces" as action] if session:
            return SessionPath(session, action)
        case ["sessions", session, "turns", turn] if session and (number := whole_number(turn)) is not None:
            return TurnPath(session, number)
        case ["sessions", session] if session:
            return SessionPath(session, "")
        case [segment, "v1", *api] if segment and api:
            if session_of(segment) is not None:
                return ApiCall("/" + "/".join(api), key=segment)
            return ApiCall("/" + "/".join(api), session=segment)
    return None
