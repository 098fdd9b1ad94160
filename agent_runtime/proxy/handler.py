"""The proxy's replies to requests, independent of sockets; `app.py` sends them."""

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from agent_runtime.proxy.admin import Admin
from agent_runtime.proxy.call import Call, Identity
from agent_runtime.proxy.chat import ChatAnswer, ChatRequest, ErrorKind, Refused, Translation, decoded
from agent_runtime.proxy.http import (
    EVENT_STREAM_HEADERS,
    JSON_HEADERS,
    ApiCall,
    Incoming,
    PlainPath,
    Reply,
    SessionPath,
    TurnPath,
    json_body,
    json_reply,
    request_key,
    target_of,
)
from agent_runtime.proxy.keys import session_of
from agent_runtime.proxy.metrics import Meter
from agent_runtime.proxy.peers import TURN
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.proxy.protocols.openai_completions import OpenAICompletions
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from agent_runtime.proxy.refused import refused
from agent_runtime.proxy.session import Session
from agent_runtime.proxy.sessions import Sessions, check_expiry, unknown_key

TRANSLATIONS: Final[Sequence[Translation]] = (OpenAIChat(), OpenAICompletions(), OpenAIResponses(), AnthropicMessages())

_LOG = logging.getLogger(__name__)
_CHAT: Final = TRANSLATIONS[0]


class Handler:
    """Answers requests. Without `admin`, sessions cannot be registered or read over HTTP."""

    def __init__(self, sessions: Sessions, *, admin: Admin | None = None, meter: Meter | None = None) -> None:
        self._sessions, self._admin, self._meter = sessions, admin, meter or Meter()
        self._translations = {translation.path: translation for translation in TRANSLATIONS}

    async def handle(self, request: Incoming) -> Reply:
        """Return the reply to a request. Raises only CancelledError, when the client disconnects."""
        target = target_of(request.path)
        translation = _CHAT
        if isinstance(target, ApiCall):
            translation = self._translations.get(target.api, _CHAT)
        try:
            match target:
                case ApiCall():
                    reply = await self._call(request, target)
                case SessionPath() if self._admin is not None:
                    reply = await self._admin.answer(request, target)
                case TurnPath():
                    reply = await self._delivery_report(request, target)
                case PlainPath("health"):
                    reply = json_reply(200, {"status": "ok", **(self._admin.health() if self._admin else {})})
                case PlainPath("metrics") if (text := self._meter.exposition()) is not None:
                    reply = Reply(200, {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}, text)
                case _:
                    raise _no_route_error(request)
        except Exception as error:  # noqa: BLE001 the client must get an error reply in its API's format
            reply = self._refusal(error, translation)
        self._meter.replied(translation.name if isinstance(target, ApiCall) else "proxy", reply.status)
        return reply

    async def _delivery_report(self, request: Incoming, target: TurnPath) -> Reply:
        found = self._sessions.of_replica(target.session, request.headers)
        if request.method != "POST" or found is None:
            raise _no_route_error(request)
        found.report_delivery(target.turn, decoded(await request.read(1024)).get("delivered") is True)
        return json_reply(200, {})

    async def _call(self, request: Incoming, target: ApiCall) -> Reply:
        key = target.key or request_key(request.headers)
        named = None if key is None else session_of(key)
        if named is None and self._admin is not None and self._admin.keyless:
            # The path names the session. Its client has no key, or only a placeholder that its SDK requires.
            named, key = target.session, None
        if named is None or target.session not in (None, named):
            raise unknown_key()
        while not isinstance(found := await self._sessions.find(named, key), Session):
            if (reply := await found.forward(request)) is not None:
                self._meter.forwarded()
                return reply
        if key is None:
            check_expiry(found.settings)
        if request.method == "GET" and target.api.startswith("/models"):
            return _models(found, target.api.removeprefix("/models").lstrip("/"))
        translation = self._translations.get(target.api)
        if translation is None or request.method != "POST":
            raise _no_route_error(request)
        body = await request.read(found.settings.limits.body_bytes)
        identity = Identity.of(target.api, request.headers, body)
        asked = translation.parse(decoded(body), found.earlier)
        call = found.begin(asked, identity)
        forwarded = self._sessions.of_replica(named, request.headers) is found
        try:
            reply = await (self._streamed if asked.stream else _whole)(call, asked, translation)
        except BaseException:
            call.leave(False)
            raise
        if forwarded:
            reply.headers = {**reply.headers, TURN: str(call.ticket.turn)}
        carried = reply.done

        def done(delivered: bool) -> None:
            carried(delivered)
            delivered = delivered and call.succeeded
            # The other replica has the reply, and reports separately whether the client got it.
            call.leave(None if delivered and forwarded else delivered)

        reply.done = done
        return reply

    async def _streamed(self, call: Call, asked: ChatRequest, translation: Translation) -> Reply:
        # Wait for the first text, so that a call that fails before gets an HTTP error status, which clients handle
        # better than an error event.
        await call.started()
        self._meter.streaming(+1)
        return Reply(200, EVENT_STREAM_HEADERS, _events(call, asked, translation), lambda _: self._meter.streaming(-1))

    def _refusal(self, error: Exception, translation: Translation) -> Reply:
        why = refused(error)
        if why.kind is ErrorKind.INTERNAL:
            _LOG.error("A request could not be answered.", exc_info=error)
        return json_reply(why.kind.status, translation.error(why.kind, why.message, why.param), why.kind.headers)


async def _whole(call: Call, asked: ChatRequest, translation: Translation) -> Reply:
    answer = ChatAnswer(await call.answer(), call.ticket.id, call.ticket.created)
    return Reply(200, JSON_HEADERS, json_body(translation.answer(asked, answer)))


async def _events(call: Call, asked: ChatRequest, translation: Translation) -> AsyncIterator[bytes]:
    ticket = call.ticket
    encoder = translation.encoder(asked, ticket.id, ticket.created)
    head = encoder.start()
    async for text in call.pieces():
        yield head + encoder.text(text)
        head = b""
    try:
        reply = await call.answer()
    except Exception as error:  # noqa: BLE001 the stream has begun, so the failure is sent as an event
        why = refused(error)
        yield head + encoder.error(why.kind, why.message)
    else:
        yield head + encoder.end(ChatAnswer(reply, ticket.id, ticket.created))


def _models(session: Session, name: str) -> Reply:
    entries = [
        {"id": known, "object": "model", "created": 0, "owned_by": "agent-rollouts"} for known in session.model_names
    ]
    if not name:
        return json_reply(200, {"object": "list", "data": entries})
    for entry in entries:
        if entry["id"] == name:
            return json_reply(200, entry)
    raise Refused(ErrorKind.MODEL_NOT_FOUND, f"model {name!r} is not served in this session")


def _no_route_error(request: Incoming) -> Refused:
    paths = ", ".join(f"/v1{translation.path}" for translation in TRANSLATIONS)
    # The message omits the path, which may contain a key.
    return Refused(ErrorKind.NOT_FOUND, f"{request.method} is not supported at this path; expected POST {paths}")
