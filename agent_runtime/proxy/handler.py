"""The proxy's replies to requests, independent of sockets; `app.py` sends them."""

import logging
import uuid
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
from agent_runtime.proxy.protocols.google_gemini import GoogleGemini, path_fields
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.proxy.protocols.openai_compaction import OpenAICompaction
from agent_runtime.proxy.protocols.openai_completions import OpenAICompletions
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from agent_runtime.proxy.queries import ANTHROPIC_HEADER, answer_query, is_google, notes_header
from agent_runtime.proxy.refused import refused
from agent_runtime.proxy.session import Session
from agent_runtime.proxy.sessions import Sessions, check_expiry, unknown_key

TRANSLATIONS: Final[Sequence[Translation]] = (
    OpenAIChat(),
    OpenAICompletions(),
    OpenAIResponses(),
    OpenAICompaction(),
    AnthropicMessages(),
    GoogleGemini(),
)

HEAD_SECONDS: Final = 1.0
"""A call that fails within this time gets an HTTP error status, on which clients act, instead of an error event. After
it the headers are sent, because clients and networks give up on a silent server.
"""
LATE_HEAD_SECONDS: Final = 30.0
"""The same where an answer that has not begun is moved to another process without the client noticing: from a dead
runner to the next one, and from a dead replica to another.
"""
PING_SECONDS: Final = 10.0
"""Silence in a stream after which a ping is sent."""
REQUEST_ID_HEADERS: Final = ("x-request-id", "request-id")
"""OpenAI's header, and Anthropic's."""

_LOG = logging.getLogger(__name__)
_CHAT: Final = TRANSLATIONS[0]
_ANTHROPIC, _GEMINI = TRANSLATIONS[-2:]


class Handler:
    """Answers requests. Without `admin`, sessions cannot be registered or read over HTTP. `head_seconds` is how long a
    stream's headers wait for its first text.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        admin: Admin | None = None,
        meter: Meter | None = None,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        self._sessions, self._admin, self._meter = sessions, admin, meter or Meter()
        self._head_seconds = head_seconds
        self._translations = {translation.path: translation for translation in TRANSLATIONS}

    async def handle(self, request: Incoming) -> Reply:
        """Return the reply to a request. Raises only CancelledError, when the client disconnects."""
        target, request_id = target_of(request.path), f"req_{uuid.uuid4().hex}"
        translation = self._spoken(request, target.api) if isinstance(target, ApiCall) else _CHAT
        try:
            match target:
                case ApiCall():
                    reply = await self._call(request, target)
                case SessionPath() if self._admin is not None:
                    reply = await self._admin.answer(request, target)
                case TurnPath():
                    reply = await self._delivery_report(request, target)
                case PlainPath("health"):
                    health = {"status": "ok", **(self._admin.health() if self._admin else {})}
                    reply = json_reply(200, health, self._sessions.proof(request.headers))
                case PlainPath("metrics") if (text := self._meter.exposition()) is not None:
                    reply = Reply(200, {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}, text)
                case _:
                    raise _no_route_error(request)
        except Exception as error:  # noqa: BLE001 the client must get an error reply in its API's format
            reply = self._refusal(error, translation, request_id)
        if isinstance(target, ApiCall) and REQUEST_ID_HEADERS[0] not in reply.headers:
            reply.headers = {**reply.headers, **dict.fromkeys(REQUEST_ID_HEADERS, request_id)}
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
        if (reply := await answer_query(found, request, target.api)) is not None:
            return reply
        in_path = path_fields(target.api, request.query)
        translation = self._translations.get(target.api) if in_path is None else _GEMINI
        if translation is None or request.method != "POST":
            raise _no_route_error(request)
        async with found.incoming(request) as body:
            identity = Identity.of(target.api, request.headers, body)
            asked = found.fitted(translation.parse(decoded(body) | (in_path or {}), found.earlier))
            call = found.begin(asked, identity)
        found.note(asked.notes)
        forwarded = self._sessions.of_replica(named, request.headers) is found
        try:
            if asked.stream:
                reply = await self._streamed(call, asked, translation, is_forwarded=forwarded)
            else:
                reply = await _whole(call, asked, translation)
        except BaseException:
            call.leave(False)
            raise
        own = {TURN: str(call.ticket.turn)} if forwarded else {}
        reply.headers = {**reply.headers, **notes_header(asked.notes), **own}
        carried = reply.done

        def done(delivered: bool) -> None:
            carried(delivered)
            delivered = delivered and call.succeeded
            # The other replica has the reply, and reports separately whether the client got it.
            call.leave(None if delivered and forwarded else delivered)

        reply.done = done
        return reply

    def _spoken(self, request: Incoming, api: str) -> Translation:
        """Return the API whose errors the client reads."""
        if is_google(request, api):
            return _GEMINI
        if api.startswith(_ANTHROPIC.path) or ANTHROPIC_HEADER in request.headers:
            return _ANTHROPIC
        return self._translations.get(api, _CHAT)

    async def _streamed(self, call: Call, asked: ChatRequest, translation: Translation, *, is_forwarded: bool) -> Reply:
        await call.started(LATE_HEAD_SECONDS if is_forwarded else self._head_seconds)
        self._meter.streaming(+1)
        return Reply(200, EVENT_STREAM_HEADERS, _events(call, asked, translation), lambda _: self._meter.streaming(-1))

    def _refusal(self, error: Exception, translation: Translation, request_id: str) -> Reply:
        why = refused(error)
        if why.kind is ErrorKind.INTERNAL:
            _LOG.error("Request %s could not be answered.", request_id, exc_info=error)
        return json_reply(why.kind.status, translation.error(why.kind, why.message, why.param), why.kind.headers)


async def _whole(call: Call, asked: ChatRequest, translation: Translation) -> Reply:
    answer = ChatAnswer(await call.answer(), call.ticket.id, call.ticket.created)
    return Reply(200, JSON_HEADERS, json_body(translation.answer(asked, answer)))


async def _events(call: Call, asked: ChatRequest, translation: Translation) -> AsyncIterator[bytes]:
    ticket = call.ticket
    encoder = translation.encoder(asked, ticket.id, ticket.created)
    head = encoder.start(call.prompt_tokens)
    if not call.has_pieces:
        yield head
        head = b""
    async for piece in call.pieces(PING_SECONDS):
        if piece is None:
            yield encoder.ping()
        elif event := head + (encoder.reasoning if piece.is_reasoning else encoder.text)(piece.text):
            yield event
        head = b""
    try:
        reply = await call.answer()
    except Exception as error:  # noqa: BLE001 the stream has begun, so the failure is sent as an event
        why = refused(error)
        yield encoder.error(why.kind, why.message)
    else:
        yield encoder.end(ChatAnswer(reply, ticket.id, ticket.created))


def _no_route_error(request: Incoming) -> Refused:
    paths = ", ".join(["/v1" * (translation is not _GEMINI) + translation.path for translation in TRANSLATIONS])
    # The message omits the path, which may contain a key.
    return Refused(ErrorKind.NOT_FOUND, f"{request.method} is not supported at this path; expected POST {paths}")
