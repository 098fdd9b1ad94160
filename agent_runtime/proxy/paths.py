"""What a path of the proxy asks for. Pure.

Calls of an API, below any of these bases (`/{session}/v1` and `/v1/chat/completions/{session}` are verl's, of
verl-recipe PR #83, `/sessions/{session}/v1` is rLLM's):

    /v1                 with the key as bearer
    /{key}/v1           with the key in the path
    /{session}/v1, /sessions/{session}/v1, /v1/chat/completions/{session}      with the key as bearer

and `/sessions/{session}`, `/sessions/{session}/complete`, `/sessions/{session}/traces`, `/health`, `/metrics`.
"""

from dataclasses import dataclass

from agent_runtime.proxy.keys import session_of

CHAT_PATH = "/chat/completions"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A call of a public API."""

    api: str
    """Path below the base URL: `/chat/completions`."""
    session: str | None = None
    """Given by name; the key comes in a header."""
    key: str | None = None
    """Given in the path."""


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
    """What is asked for; None where there is nothing."""
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
