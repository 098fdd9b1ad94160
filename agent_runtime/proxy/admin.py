"""Registration, reading, completion and deletion of sessions over HTTP (routes in docs/session-proxy.md).

Records list the turns whose answer was delivered to a client. Their format is that of verl-recipe PR #83, and for
traces that of rLLM (rllm-model-gateway, TraceRecord).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from agent_runtime.proxy import keys
from agent_runtime.proxy.chat import BadRequest, ErrorKind, Refused, decoded
from agent_runtime.proxy.history import History, Turn, failed_calls, last_failure
from agent_runtime.proxy.http import Incoming, Reply, SessionPath, json_reply, request_key
from agent_runtime.proxy.limits import Limits
from agent_runtime.proxy.ownership import StoredSessions
from agent_runtime.proxy.session import Session, SessionSettings
from agent_runtime.proxy.sessions import check_key
from agent_runtime.recording.messages import undelivered_turns
from rollout_api.base import ApiModel, Seconds, problems_in
from rollout_api.model import Sampling
from rollout_api.records import Record


def session_view(settings: SessionSettings, records: Sequence[Record], *, completed: bool) -> dict[str, Any]:
    """Return the body of `GET /sessions/{id}`: PR #83's record with additional fields."""
    history = History(records)
    return {
        "session_id": settings.id,
        "created_at": settings.created,
        "completed": completed,
        "metadata": settings.metadata,
        "turns": [_turn(history, turn) for turn in _counted(history, records)],
        "usage": {"requests": history.spent.requests, "turns": history.spent.turns, "tokens": history.spent.tokens},
    }


def traces_view(settings: SessionSettings, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the body of `GET /sessions/{id}/traces`: rLLM's records."""
    history = History(records)
    return [_trace(settings, history, turn) for turn in _counted(history, records)]


def _counted(history: History, records: Sequence[Record]) -> Iterator[Turn]:
    extended = {turn.intent.parent for turn in history.turns.values()}
    undelivered = undelivered_turns(records) - extended
    return (turn for number, turn in sorted(history.turns.items()) if number not in undelivered)


def _turn(history: History, turn: Turn) -> dict[str, Any]:
    reply = history.reply(turn)
    return {
        "turn": turn.intent.turn,
        "parent": turn.intent.parent,
        "request_messages": history.conversation(turn)[:-1],
        "tools": turn.tools,
        "completion_text": reply.text,
        "message": reply.message,
        "tool_calls": reply.message.get("tool_calls") or [],
        "finish_reason": reply.finish_reason,
        "prompt_token_ids": reply.prompt_token_ids,
        "completion_token_ids": reply.completion_token_ids,
        "completion_logprobs": reply.logprobs,
        "policy_spans": [span.wire() for span in reply.policy_spans],
    }


def _trace(settings: SessionSettings, history: History, turn: Turn) -> dict[str, Any]:
    reply, response = history.reply(turn), turn.response
    versions = [span.version for span in reply.policy_spans]
    return {
        "trace_id": f"{settings.id}-{turn.intent.turn}",
        "session_id": settings.id,
        "model": reply.model,
        "messages": history.conversation(turn)[:-1],
        "prompt_token_ids": reply.prompt_token_ids or [],
        "response_message": reply.message,
        "completion_token_ids": reply.completion_token_ids or [],
        "logprobs": reply.logprobs,
        "finish_reason": reply.finish_reason,
        # rLLM has one version per call. If a policy update happened during a call, give the oldest one.
        "weight_version": int(versions[0]) if versions and versions[0] and versions[0].isdecimal() else None,
        "latency_ms": response.seconds * 1000,
        "token_counts": {"prompt": reply.usage.prompt_tokens, "completion": reply.usage.completion_tokens},
        "timestamp": response.time,
        "metadata": {"tools": turn.tools, **settings.metadata},
    }


_BODY_BYTES = 1 << 20


class Registration(ApiModel):
    """The body of a registration; all fields are optional."""

    expires_seconds: Seconds | None = None
    """Validity of the key."""
    models: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)] = []
    """Names that clients may use for the model; none: the model's own."""
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    """Sampling that overrides the client's."""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: dict[str, Any] = {}


class Admin:
    """Handles `/sessions`. `workers` counts the relayed model's connections, if it is relayed."""

    def __init__(self, sessions: StoredSessions, admin_key: str | None, workers: Callable[[], int] = lambda: 0) -> None:
        """Without an admin key the proxy is keyless: every client that reaches it may use all routes."""
        self._sessions, self._workers = sessions, workers
        self._digest = None if admin_key is None else keys.digest(admin_key)

    @property
    def keyless(self) -> bool:
        return self._digest is None

    def health(self) -> dict[str, Any]:
        return {"mode": "standalone", "connected_workers": self._workers(), "sessions": self._sessions.held}

    async def answer(self, request: Incoming, target: SessionPath) -> Reply:
        """Return the reply. Raises Refused, BadRequest."""
        name = target.session
        if not keys.is_session_id(name):
            raise BadRequest(f"session id: expected {keys.SESSION_FORM}")
        match request.method, target.action:
            case "GET", "" | "traces":
                return await self._read(request, target)
            case "POST", "":
                self._check(request)
                return await self._register(request, name)
            case ("POST", "complete") | ("DELETE", ""):
                self._check(request)
                return await self._finish(request, name, delete=request.method == "DELETE")
        raise Refused(ErrorKind.NOT_FOUND, f"{request.method} is not supported by sessions")

    def _check(self, request: Incoming) -> None:
        if not self._is_admin(request):
            raise Refused(ErrorKind.UNAUTHORIZED, "send the proxy's admin key as bearer token")

    def _is_admin(self, request: Incoming) -> bool:
        if self._digest is None:
            return True
        key = request_key(request.headers)
        return key is not None and keys.matches(key, self._digest)

    async def _register(self, request: Incoming, name: str) -> Reply:
        wanted = await _registration(request)
        key, now = keys.new_key(name), time.time()
        settings = SessionSettings(
            id=name,
            key_digest=keys.digest(key),
            created=now,
            expires=None if wanted.expires_seconds is None else now + wanted.expires_seconds,
            models=wanted.models,
            limits=wanted.limits,
            sampling=wanted.sampling,
            seed=wanted.seed,
            metadata=wanted.metadata,
        )
        if not await self._sessions.register(settings):
            raise Refused(
                ErrorKind.SESSION_EXISTS, f"session {name} exists already; delete it first, or register another name"
            )
        return json_reply(201, {"session_id": name, "key": key, "base_path": f"/{key}/v1"})

    async def _read(self, request: Incoming, target: SessionPath) -> Reply:
        store, name = self._sessions.store, target.session
        settings = await store.settings(name)
        if not self._is_admin(request):
            if settings is None or (key := request_key(request.headers)) is None:
                raise Refused(
                    ErrorKind.UNAUTHORIZED, "send the proxy's admin key, or the session's key, as bearer token"
                )
            check_key(settings, key)
        if settings is None:
            raise _no_such(name)
        records = await store.folder(settings).records()
        if target.action == "traces":
            return json_reply(200, traces_view(settings, records))
        return json_reply(200, session_view(settings, records, completed=await store.is_completed(settings)))

    async def _finish(self, request: Incoming, name: str, *, delete: bool) -> Reply:
        """Complete or delete a session at its owner. Completed sessions have no owner."""
        if (settings := await self._sessions.store.settings(name)) is None:
            raise _no_such(name)
        if await self._sessions.store.is_completed(settings):
            # An earlier reply may have been lost, so this one says the same.
            records = await self._sessions.store.folder(settings).records()
            turn, failure = last_failure(failed_calls(records), History(records).calls)
        else:
            while not isinstance(found := await self._sessions.find(name, None), Session):
                if (reply := await found.forward(request)) is not None:
                    return reply
            await self._sessions.complete(found)
            settings, (turn, failure) = found.settings, found.last_failure
        if delete:
            await self._sessions.store.delete(settings)
        said = {"failure": None if failure is None else str(failure), "failed_turn": turn}
        return json_reply(200, {"session_id": name, "completed": True, "deleted": delete, **said})


def _no_such(name: str) -> Refused:
    return Refused(ErrorKind.NOT_FOUND, f"there is no session {name}; register it with POST /sessions/{name}")


async def _registration(request: Incoming) -> Registration:
    body = await request.read(_BODY_BYTES)
    if not body.strip():
        return Registration()
    try:
        return Registration.model_validate(decoded(body))
    except ValidationError as error:
        raise BadRequest(problems_in(error, "body")[0]) from None
