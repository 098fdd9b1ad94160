"""One request as the handlers see it, and the table entry that says how it is to be made."""

from __future__ import annotations

import enum
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agent_runtime.executor.attempts.fencing import Hold
from agent_runtime.executor.attempts.idempotency import Key, StoredReply
from agent_runtime.executor.errors import bad_request
from agent_runtime.executor.http.fields import Fields, Query
from agent_runtime.executor.http.messages import Reply, StreamedReply, Switched
from agent_runtime.executor.http.server import Request
from agent_runtime.executor.sandbox import Hosted, Sandbox

# docs/executor.md: JSON bodies of up to 1 MiB, standard input of up to 8 MiB.
MAX_JSON_BYTES = 1024 * 1024
MAX_INPUT_BYTES = 8 * 1024 * 1024
# Longer waits gain nothing over asking again, and every proxy on the way has a limit of its own.
MAX_WAIT_SECONDS = 3600.0

_decode = json.JSONDecoder().decode


@dataclass
class Call:
    """A request with what its path, headers and body name. Changes have `attempt` and `key`, or, repeatable, `hold`."""

    sandbox: Sandbox
    request: Request
    segments: list[str]
    body: bytes = b""
    attempt: str = ""
    key: Key | None = None
    hold: Hold | None = None

    def fields(self) -> Fields:
        """The JSON object of the body; `{}` for an empty one. Raises BadRequest."""
        try:
            value = _decode(self.body.decode()) if self.body else {}
        except (ValueError, RecursionError) as error:
            raise bad_request(f"body: JSON expected ({error})") from None
        return Fields(value, "body", bad_request)

    def no_fields(self) -> None:
        """Raises BadRequest for a body that says something."""
        self.fields().done()

    def query(self) -> Query:
        """The query's values."""
        return Query(self.request.head.query(), bad_request)

    def no_query(self) -> None:
        """Raises BadRequest for a query that says something."""
        if self.request.head.query_string:
            self.query().done()

    def upgrade(self, protocol: str) -> None:
        """Raises BadRequest unless it asks for its connection to become `protocol`'s, and for nothing else."""
        self.no_query()
        self.no_fields()
        asked = self.request.head.headers.get("upgrade", "")
        if asked.lower() != protocol:
            raise bad_request(f"Upgrade: {protocol!r} expected, got {asked[:40]!r}")

    def seen(self) -> Hosted:
        """The workspace of the path, to be read. Raises NotFound."""
        return self.sandbox.workspace(self.segments[1])

    def owned(self) -> Hosted:
        """The workspace of the path, to be changed. Raises NotFound, Conflict."""
        return self.sandbox.owned_workspace(self.segments[1], self.attempt)


class Kind(enum.Enum):
    """How a change's body is taken, and whether a newer hold may break it off."""

    JSON = enum.auto()
    INPUT = enum.auto()
    UPLOAD = enum.auto()


@dataclass(frozen=True)
class Read:
    """A route that changes nothing."""

    handle: Callable[[Call], Awaitable[Reply | StreamedReply]]


@dataclass(frozen=True)
class Change:
    """A route that changes something, once a key."""

    handle: Callable[[Call], Awaitable[StoredReply]]
    kind: Kind = Kind.JSON
    max_body_bytes: int = MAX_JSON_BYTES


@dataclass(frozen=True)
class Repeatable:
    """A route whose effect is the same however often it is called: it needs the hold, and no key."""

    handle: Callable[[Call], Awaitable[Reply | Switched]]


@dataclass(frozen=True)
class Control:
    """A route about an attempt itself, which may be repeated without a key."""

    handle: Callable[[Call], Awaitable[Any]]


@dataclass(frozen=True)
class Switch:
    """A route that makes its connection another protocol's, whose requests each name their own hold."""

    handle: Callable[[Call], Switched]
