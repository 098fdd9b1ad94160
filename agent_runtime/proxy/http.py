"""Requests and replies, independent of their transport (a socket, an executor's model port), and parsing of paths."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.proxy.keys import session_of

JSON_HEADERS: Mapping[str, str] = {"Content-Type": "application/json"}
EVENT_STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # disable nginx's buffering of events
}


class BodyTooLarge(Exception):
    """The request's body is too large; the message has the limit."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the body has more than {most} bytes, the limit for requests")


@dataclass(slots=True)
class Incoming:
    """A request."""

    method: str
    path: str
    """Path without the query."""
    headers: Mapping[str, str]
    """Headers with lower-case names."""
    read: Callable[[int], Awaitable[bytes]]
    """Returns the body, at most this many bytes. Raises BodyTooLarge. A repeated call returns the same."""
    query: str = ""
    """Query with its percent-encoding."""


def _ignore(delivered: bool) -> None:
    pass


@dataclass(slots=True)
class Reply:
    """A reply. The transport calls `done` once: with True when its last byte was written to the client's connection,
    with False if the connection was lost.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]
    done: Callable[[bool], None] = field(default=_ignore)


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, {**JSON_HEADERS, **(headers or {})}, json_body(body))


def json_body(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


KEY_HEADERS = ("x-api-key", "api-key", "x-goog-api-key")


def request_key(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request: a bearer token, the password of Basic authentication (as in a URL), or a header of
    KEY_HEADERS. Header names must be in lower case, or `headers` case-insensitive.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(token, validate=True).decode().partition(":")[2] or None
    return next((headers[name] for name in KEY_HEADERS if headers.get(name)), None)


CHAT_PATH = "/chat/completions"
BETA = "/v1beta"
"""Beginning of the paths of Google's API, whose newer clients use `/v1`."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A call of a public API."""

    api: str
    """Path below the base URL: `/chat/completions`. That below `/v1beta` begins with it."""
    session: str | None = None
    """Session name in the path; the key is in a header."""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class SessionPath:
    """`/sessions/{session}` and paths below it."""

    session: str
    action: str
    """Empty, `complete` or `traces`."""


@dataclass(frozen=True, slots=True)
class TurnPath:
    """`/sessions/{session}/turns/{turn}`: a replica reports to another whether a reply was delivered."""

    session: str
    turn: int


@dataclass(frozen=True, slots=True)
class PlainPath:
    """A path outside sessions."""

    name: str
    """`health` or `metrics`."""


Target = ApiCall | SessionPath | TurnPath | PlainPath


def whole_number(text: str) -> int | None:
    """Parse a client's number of at most 9 digits, because Python raises an error for very long numbers."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


def target_of(path: str) -> Target | None:
    match path.split("/")[1:]:
        case ["health" | "metrics" as name]:
            return PlainPath(name)
        case ["v1", "chat", "completions", session] if session:
            return ApiCall(CHAT_PATH, session=session)
        case ["v1" | "v1beta" as version, *api] if api:
            return ApiCall(_api(version, api))
        case ["sessions", session, "v1" | "v1beta" as version, *api] if session and api:
            return ApiCall(_api(version, api), session=session)
        case ["sessions", session, "complete" | "traces" as action] if session:
            return SessionPath(session, action)
        case ["sessions", session, "turns", turn] if session and (number := whole_number(turn)) is not None:
            return TurnPath(session, number)
        case ["sessions", session] if session:
            return SessionPath(session, "")
        case [segment, "v1" | "v1beta" as version, *api] if segment and api:
            if session_of(segment) is not None:
                return ApiCall(_api(version, api), key=segment)
            return ApiCall(_api(version, api), session=segment)
    return None


def _api(version: str, path: Sequence[str]) -> str:
    return "/".join(["" if version == "v1" else BETA, *path])
