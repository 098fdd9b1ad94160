"""A small server with all protocols for one session, and a model that answers what the test sets."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, ErrorKind, Translation, decoded
from agent_runtime.proxy.conversation import Conversations, MatchedMessages
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.proxy.protocols.openai_completions import OpenAICompletions
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from rollout_api.records import Message


class Fails(Exception):
    """An error as the model's answer."""

    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class Session:
    """What the tests set and read."""

    model: Callable[[list[Message]], ModelReply] = lambda messages: ModelReply({}, "")
    url: str = ""
    requests: list[ChatRequest] = field(default_factory=list)
    known: list[MatchedMessages] = field(default_factory=list)
    conversations: Conversations = field(default_factory=Conversations)
    stored: dict[str, list[Message]] = field(default_factory=dict)
    turns: "itertools.count[int]" = field(default_factory=itertools.count)


async def respond(session: Session, protocol: Translation, request: web.Request) -> web.StreamResponse:
    try:
        parsed = protocol.parse(decoded(await request.read()), session.stored.get)
    except BadRequest as error:
        return refused(protocol, error.kind, error.message, error.param)
    session.requests.append(parsed)
    known = session.conversations.find(parsed.messages)
    session.known.append(known)
    turn = next(session.turns)
    try:
        answer = ChatAnswer(session.model(known.messages), f"t{turn}", 1700000000)
    except Fails as failure:
        return refused(protocol, failure.kind, "the model failed")
    session.conversations.add(known.messages, answer.reply.message, turn)
    session.stored[answer.id] = [*known.messages, answer.reply.message]
    if not parsed.stream:
        return web.json_response(protocol.answer(parsed, answer))
    encoder = protocol.encoder(parsed, answer.id, answer.created)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(encoder.start(0))
    for piece in answer.reply.text.split(" ")[:1]:
        if piece:
            await response.write(encoder.text(piece))
    await response.write(encoder.end(answer))
    return response


def refused(protocol: Translation, kind: ErrorKind, message: str, param: str | None = None) -> web.Response:
    return web.json_response(protocol.error(kind, message, param), status=kind.status, headers=kind.headers)


@asynccontextmanager
async def serve_protocols() -> AsyncIterator[Session]:
    """Serve on a free port until the end of the block."""
    session, app = Session(), web.Application()

    def serve(protocol: Translation) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await respond(session, protocol, request)

        app.router.add_post(f"/v1{protocol.path}", handler)

    for protocol in (OpenAIChat(), OpenAICompletions(), OpenAIResponses(), AnthropicMessages()):
        serve(protocol)
    server = TestServer(app)
    async with server:
        session.url = str(server.make_url("")).rstrip("/")
        yield session
