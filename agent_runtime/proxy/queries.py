"""Requests that record no turn: models, counts of tokens, recorded responses, and a test of the model."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from agent_runtime.models.probe import ProbeResult
from agent_runtime.proxy.chat import BadRequest, ChatRequest, JsonObject, Note, NoteKind, Translation, decoded
from agent_runtime.proxy.http import BETA, Incoming, Reply, json_reply
from agent_runtime.proxy.protocols import google_gemini
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.models_list import models_body
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses, answer_id
from agent_runtime.proxy.protocols.stored_responses import input_items, stored_response, unknown_response
from agent_runtime.proxy.session import Session, StoredAnswer

ANTHROPIC_HEADER: Final = "anthropic-version"
"""Header of Anthropic's package, whose list of models has the path of OpenAI's."""
GOOGLE_HEADER: Final = "x-goog-api-client"
"""Header of Google's packages, whose newer versions use the paths of OpenAI's list of models."""
NOTES_HEADER: Final = "x-rollout-notes"
"""Header that tells what was dropped from a request."""
_MOST_NOTED: Final = 1000
"""Most characters of that header: servers between may limit all headers to 8 KiB."""

ESTIMATE: Final = Note(NoteKind.COUNT, "input_tokens: an estimate, because the model server does not count tokens")

_MESSAGES, _RESPONSES, _GEMINI = AnthropicMessages(), OpenAIResponses(), google_gemini.GoogleGemini()


def notes_header(notes: Sequence[Note]) -> dict[str, str]:
    """Return the header for notes; empty if there are none."""
    text = "; ".join(note.text for note in notes)
    printable = "".join(letter if " " <= letter <= "~" else "?" for letter in text[: _MOST_NOTED + 1])
    if len(printable) > _MOST_NOTED:
        printable = printable[: _MOST_NOTED - 3] + "..."
    return {NOTES_HEADER: printable} if printable else {}


def is_google(request: Incoming, api: str) -> bool:
    """Whether the client speaks Google's API."""
    return api.startswith(BETA) or GOOGLE_HEADER in request.headers


async def answer_query(session: Session, request: Incoming, api: str) -> Reply | None:
    """Return the reply; None if the request is not a query. Raises Refused."""
    match [request.method, *api.removeprefix(BETA).split("/")[1:]]:
        case ["GET", "models", *name] if is_google(request, api):
            return json_reply(200, google_gemini.models_body(session.model_names, "/".join(name)))
        case ["GET", "models", *name]:
            is_anthropic = ANTHROPIC_HEADER in request.headers
            return json_reply(200, models_body(session.model_names, "/".join(name), anthropic=is_anthropic))
        case ["POST", "test"]:
            found = await session.test()
            return json_reply(200, {"answers": found is ProbeResult.ANSWERED, "refuses": found is ProbeResult.REFUSED})
        case ["POST", "models", *name] if name and name[-1].endswith(":countTokens"):
            model = "/".join(name).removesuffix(":countTokens")

            def fields(body: JsonObject) -> JsonObject:
                inner = body.get("generateContentRequest")
                return {**(inner if isinstance(inner, dict) else body), "model": model}

            return await _counted(session, await _parsed(session, request, _GEMINI, fields), {}, "totalTokens")
        case ["POST", "messages", "count_tokens"]:
            asked = await _parsed(session, request, _MESSAGES, lambda body: {"max_tokens": 1, **body})
            return await _counted(session, asked, {})
        case ["POST", "responses", "input_tokens"]:
            asked = await _parsed(session, request, _RESPONSES, lambda body: body)
            return await _counted(session, asked, {"object": "response.input_tokens"})
        case ["GET", "responses", id]:
            async with session.bodies.turn():
                stored = _stored(session, id)
                model = stored.answer.reply.model or session.model_names[0]
                return json_reply(200, stored_response(id, model, stored.answer, stored.messages, stored.tools))
        case ["GET", "responses", id, "input_items"]:
            async with session.bodies.turn():
                return json_reply(200, input_items(id, _stored(session, id).messages, request.query))
        case ["DELETE", "responses", id]:
            session.forget(_stored(session, id).answer.id)
            return json_reply(200, {"id": id, "object": "response", "deleted": True})
        case ["POST", "responses", id, "cancel"]:
            _stored(session, id)
            raise BadRequest("the response is complete; end a running one by closing its connection", "response_id")
    return None


async def _parsed(
    session: Session, request: Incoming, translation: Translation, fields: Callable[[JsonObject], JsonObject]
) -> ChatRequest:
    async with session.bodies.body(request, session.settings.limits.body_bytes) as body:
        return translation.parse(fields(decoded(body)), session.earlier)


async def _counted(session: Session, asked: ChatRequest, head: dict[str, Any], name: str = "input_tokens") -> Reply:
    count, is_estimate = await session.count_tokens(session.fitted(asked))
    notes = [*asked.notes, ESTIMATE] if is_estimate else [*asked.notes]
    session.note(notes)
    return json_reply(200, {**head, name: count}, notes_header(notes))


def _stored(session: Session, id: str) -> StoredAnswer:
    stored = session.stored(answer_id(id))
    if stored is None:
        raise unknown_response(id)
    return stored
