"""A request as handlers see it, and the table entry that defines how it is handled."""

from __future__ import annotations

import enum
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agent_runtime.executor.attempts import Hold, Key
from agent_runtime.executor.errors import bad_request
from agent_runtime.executor.http.fields import Fields, Query
from agent_runtime.executor.http.messages import Reply, StreamedReply, Switched, json_reply
from agent_runtime.executor.http.server import Request
from agent_runtime.executor.sandbox import Sandbox, WorkspaceEntry

# docs/executor.md: JSON bodies of up to 1 MiB, standard input of up to 8 MiB.
MAX_JSON_BYTES = 1024 * 1024
MAX_INPUT_BYTES = 8 * 1024 * 1024
# A longer wait has no advantage over repeated requests, and proxies limit the duration of requests.
MAX_WAIT_SECONDS = 3600.0

_decode = json.JSONDecoder().decode


@dataclass
class Call:
    """A request with its path, headers and body parsed. Changes have `attempt` and `key`; repeatable ones `hold`."""

    sandbox: Sandbox
    request: Request
    segments: list[str]
    body: bytes = b""
    attempt: str = ""
    key: Key | None = None
    hold: Hold | None = None

    def fields(self) -> Fields:
        """Return the body's JSON object; `{}` for an empty body. Raises BadRequest."""
        try:
            value = _decode(self.body.decode()) if self.body else {}
        except (ValueError, RecursionError) as error:
            raise bad_request(f"body: JSON expected ({error})") from None
        return Fields(value, "body", bad_request)

    def query(self) -> Query:
        """Return the query's values. Raises BadRequest."""
        return Query(self.request.head.query())

    def upgrade(self, protocol: str) -> None:
        """Raise BadRequest unless the request upgrades its connection to `protocol`."""
        asked = self.request.head.headers.get("upgrade", "")
        if asked.lower() != protocol:
            raise bad_request(f"Upgrade: {protocol!r} expected, got {asked[:40]!r}")

    def seen(self) -> WorkspaceEntry:
        """Return the workspace of the path, for reading. Raises NotFound."""
        return self.sandbox.workspace(self.segments[1])

    def owned(self) -> WorkspaceEntry:
        """Return the workspace of the path, for changes. Raises NotFound, Conflict."""
        return self.sandbox.owned_workspace(self.segments[1], self.attempt)

    def live(self) -> WorkspaceEntry:
        """Return the workspace of the path, for work in it. Raises NotFound, Conflict, WorkspaceFailed."""
        entry = self.owned()
        entry.require_live()
        return entry


class Body(enum.Enum):
    """Type of a route's body. A newer hold may cancel only work that reads an INPUT body."""

    NOTHING = enum.auto()
    JSON = enum.auto()
    INPUT = enum.auto()
    UPLOAD = enum.auto()


class Rule(enum.Enum):
    """What a call of a route must name, besides the token in its headers."""

    READ = enum.auto()
    """Nothing: it changes nothing. With a key, its reply is remembered."""
    CHANGE = enum.auto()
    """An attempt, its hold and a key: it is made once."""
    REPEATABLE = enum.auto()
    """An attempt and its hold: a repeat has the same effect."""
    ATTEMPT = enum.auto()
    """An attempt in its path. The handler checks the hold itself."""
    TOKEN = enum.auto()
    """Nothing: it concerns the whole executor, or each request of the upgraded protocol names its own hold."""


@dataclass(frozen=True)
class Route:
    """Handling of a call. The answer is the JSON value that `handle` returns, or the reply."""

    rule: Rule
    handle: Callable[[Call], Awaitable[dict[str, Any] | Reply | StreamedReply | Switched]]
    body: Body = Body.NOTHING
    has_query: bool = False

    async def reply(self, call: Call) -> Reply | StreamedReply | Switched:
        """Handle a call. Raises BadRequest for a query or a body that the route does not accept, and errors of
        `handle`.
        """
        if not self.has_query and call.request.head.query_string:
            call.query().done()
        if self.body is Body.NOTHING:
            call.fields().done()
        answer = await self.handle(call)
        return json_reply(answer) if isinstance(answer, dict) else answer
