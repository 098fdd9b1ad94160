"""Google's Gemini API (ai.google.dev/api/generate-content), whole and streamed. Pure.

The model's name and the method are in the path, so `parse` gets them as the fields `model` and `stream` of the body.
"""

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agent_runtime.models.answers import reasoning_of
from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Earlier,
    ErrorKind,
    JsonObject,
    NoteKind,
    StreamedText,
    sse,
)
from agent_runtime.proxy.conversation import assistant, decoded_arguments
from agent_runtime.proxy.http import BETA
from agent_runtime.proxy.protocols.anthropic_messages import ERROR_PREFIX
from agent_runtime.proxy.protocols.fields import (
    Fields,
    Notes,
    each,
    fitting_choice,
    given,
    objects,
    required,
    sampling,
    typed,
    words,
)
from agent_runtime.proxy.protocols.models_list import unknown_model
from agent_runtime.proxy.protocols.openai_chat import function_call, left_out
from rollout_api.records import Message

FIELDS = Fields(
    honoured=words("contents generationConfig model stream systemInstruction toolConfig tools"),
    passed=frozenset(),
    ignored=words("labels safetySettings serviceTier store"),
    dropped={"modelArmorConfig": "answers are not filtered here"},
    refused={"cachedContent": "contents are not stored here; send them all"},
)
CONFIG = Fields(
    honoured=words(
        "candidateCount frequencyPenalty maxOutputTokens presencePenalty responseJsonSchema responseMimeType "
        "responseModalities responseSchema seed stopSequences temperature thinkingConfig topK topP"
    ),
    passed=frozenset(),
    ignored=words("enableEnhancedCivicAnswers mediaResolution"),
    dropped={
        "audioTimestamp": "the model reads text only",
        "audioTranscriptionConfig": "the model reads text only",
        "enableAffectiveDialog": "the model writes text only",
        "logprobs": "logprobs are recorded, but only chat completions returns them",
        "modelSelectionConfig": "a session has one model",
        "responseFormat": "give responseMimeType and responseJsonSchema",
        "responseLogprobs": "logprobs are recorded, but only chat completions returns them",
        "routingConfig": "a session has one model",
        "speechConfig": "the model writes text only",
        "translationConfig": "the model writes text only",
    },
    refused={},
)
"""Fields of `generationConfig`."""

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}
FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
TOOL_MODES = {"ANY": "required", "NONE": "none"}


PATH = re.compile(rf"(?:{BETA})?/models/(.+):(\w+)")
"""Path of a call below `/v1`, or that below `/v1beta`: the model's name, and the method."""
METHODS = {"generateContent": False, "streamGenerateContent": True}
"""Methods of a call, and whether each streams its answer."""


def path_fields(api: str, query: str) -> JsonObject | None:
    """Return the fields that the path of a call contains; None for another path. Raises BadRequest."""
    found = PATH.fullmatch(api)
    if found is None or found[2] not in METHODS:
        return None
    if METHODS[found[2]] and "alt=sse" not in query.split("&"):
        raise BadRequest("alt: streams are events here; add ?alt=sse to the URL", "alt")
    return {"model": found[1], "stream": METHODS[found[2]]}


def models_body(names: Sequence[str], wanted: str) -> JsonObject:
    """Return the list of models, or the entry of the `wanted` name if it is not empty. Raises Refused."""
    methods = [*METHODS, "countTokens"]
    entries = [
        {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": methods}
        for name in names
    ]
    if not wanted:
        return {"models": entries}
    for name, entry in zip(names, entries, strict=True):
        if name == wanted:
            return entry
    raise unknown_model(wanted, names)


class GoogleGemini:
    """A `Translation`. Its path is complete, and has the model's name in it."""

    name = "gemini"
    path = "/v1beta/models/MODEL:generateContent"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        notes, body = Notes(), _camel_case(body)
        FIELDS.check(body, notes)
        config = _camel_case(given(body, "generationConfig", dict, {}))
        CONFIG.check(config, notes)
        if config.get("candidateCount") not in (None, 1):
            raise BadRequest("candidateCount: only 1 is supported; send several requests instead", "candidateCount")
        if any(modality != "TEXT" for modality in given(config, "responseModalities", list, [])):
            notes.drop(NoteKind.FIELD, "responseModalities", "the model writes text only")
        messages = _system(body.get("systemInstruction")) + _conversation(body, notes)
        tools = [
            function for group in each(body.get("tools"), "tools", partial(_tools, notes=notes)) for function in group
        ]
        thinking = _camel_case(given(config, "thinkingConfig", dict, {}))
        extra = fitting_choice(_sampled_otherwise(body, config, thinking, notes), tools, notes)
        asked = {
            "temperature": config.get("temperature"),
            "top_p": config.get("topP"),
            "maxOutputTokens": config.get("maxOutputTokens"),
            "stopSequences": config.get("stopSequences"),
        }
        return ChatRequest(
            model=required(body, "model", str),
            messages=messages,
            tools=tools,
            sampling=sampling(asked, max_tokens=("maxOutputTokens",), stop="stopSequences", extra=extra, passed=()),
            seed=typed(config["seed"], int, "seed") if config.get("seed") is not None else None,
            stream=given(body, "stream", bool, False),
            extra={"thinking": thinking.get("includeThoughts") is True},
            notes=notes.all,
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        reply = answer.reply
        thought = reasoning_of(reply.message) if request.extra["thinking"] else ""
        parts = [*_texts(thought, thought=True), *_texts(reply.text), *_calls(reply)] or [{"text": ""}]
        return _chunk(request, answer.id, parts, reply)

    def encoder(self, request: ChatRequest, id: str, created: int) -> "GeminiEncoder":
        return GeminiEncoder(request, id)

    def error(self, kind: ErrorKind, message: str, param: str | None = None) -> JsonObject:
        """Return the body of an error; the API names the field only in the message."""
        status = STATUSES.get(kind.status, "UNAVAILABLE")
        return {"error": {"code": kind.status, "message": message, "status": status}}


class GeminiEncoder:
    """See `Encoder`. Each event is a response with a piece of the answer."""

    def __init__(self, request: ChatRequest, id: str) -> None:
        self._request, self._id = request, id
        self._sent, self._thought = StreamedText(), StreamedText()

    def start(self, prompt_tokens: int) -> bytes:
        return sse(_head(self._request, self._id) | {"usageMetadata": {"promptTokenCount": prompt_tokens}})

    def reasoning(self, piece: str) -> bytes:
        if not self._request.extra["thinking"]:
            return b""
        self._thought.add(piece)
        return self._event(_texts(piece, thought=True))

    def text(self, piece: str) -> bytes:
        self._sent.add(piece)
        return self._event(_texts(piece))

    def ping(self) -> bytes:
        """Return a response without content: not every client of this API accepts comments."""
        return sse(_head(self._request, self._id))

    def end(self, answer: ChatAnswer) -> bytes:
        reply = answer.reply
        thought = reasoning_of(reply.message) if self._request.extra["thinking"] else ""
        parts = [
            *_texts(self._thought.missing(thought), thought=True),
            *_texts(self._sent.missing(reply.text)),
            *_calls(reply),
        ]
        return self._event(parts or [{"text": ""}], reply)

    def error(self, kind: ErrorKind, message: str) -> bytes:
        return sse(GoogleGemini().error(kind, message))

    def _event(self, parts: Sequence[JsonObject], reply: ModelReply | None = None) -> bytes:
        return sse(_chunk(self._request, self._id, parts, reply))


def _head(request: ChatRequest, id: str) -> JsonObject:
    return {"responseId": id, "modelVersion": request.model}


def _chunk(request: ChatRequest, id: str, parts: Sequence[JsonObject], reply: ModelReply | None) -> JsonObject:
    """Return a response with these parts; with the reply it is the last one."""
    candidate: JsonObject = {"index": 0, "content": {"role": "model", "parts": list(parts)}}
    if reply is None:
        return {"candidates": [candidate], **_head(request, id)}
    candidate["finishReason"] = FINISH_REASONS.get(reply.finish_reason, "STOP")
    counted = reply.usage
    usage = {
        "promptTokenCount": counted.prompt_tokens,
        "cachedContentTokenCount": counted.cached_tokens,
        "candidatesTokenCount": counted.completion_tokens - counted.reasoning_tokens,
        "thoughtsTokenCount": counted.reasoning_tokens,
        "totalTokenCount": counted.prompt_tokens + counted.completion_tokens,
    }
    return {"candidates": [candidate], **_head(request, id), "usageMetadata": usage}


def _texts(text: str, *, thought: bool = False) -> list[JsonObject]:
    return [{"text": text, **({"thought": True} if thought else {})}] if text else []


def _calls(reply: ModelReply) -> list[JsonObject]:
    return [
        {"functionCall": {"id": call.id, "name": call.name, "args": decoded_arguments(call.arguments)}}
        for call in reply.tool_calls
    ]


def _camel_case(fields: Mapping[str, Any]) -> JsonObject:
    """Return the fields by their usual names: the API takes `generation_config` for `generationConfig`."""
    named: JsonObject = {}
    for name, value in fields.items():
        first, *others = name.split("_")
        named[first + "".join(word.capitalize() for word in others)] = value
    return named


def _system(instruction: Any) -> list[Message]:
    if instruction is None:
        return []
    parts = [{"text": instruction}] if isinstance(instruction, str) else _parts(instruction, "systemInstruction")
    text = "\n".join(_text(part, f"systemInstruction.parts[{i}]") for i, part in enumerate(parts))
    return [{"role": "system", "content": text}] if text else []


def _parts(content: Any, where: str) -> Sequence[JsonObject]:
    parts = typed(content, dict, where).get("parts") or []
    return objects([parts] if isinstance(parts, dict) else parts, f"{where}.parts")


def _conversation(body: Mapping[str, Any], notes: Notes) -> list[Message]:
    contents = objects(required(body, "contents", list), "contents")
    if not contents:
        raise BadRequest("contents: expected at least one content, got an empty list", "contents")
    if contents[-1].get("role") == "model":
        raise BadRequest(
            "contents: the last content is the model's, which this model cannot continue; end the conversation with a "
            "user content",
            "contents",
        )
    messages: list[Message] = []
    unanswered = _Unanswered()
    model_parts: list[tuple[JsonObject, str]] = []
    for i, content in enumerate(contents):
        where = f"contents[{i}]"
        parts = [(part, f"{where}.parts[{j}]") for j, part in enumerate(_parts(content, where))]
        if content.get("role") == "model":
            # Clients keep each piece of a stream as a content.
            model_parts += parts
            continue
        if model_parts:
            messages.append(_answer(model_parts, unanswered, len(messages), notes))
            model_parts = []
        if content.get("role") not in (None, "user", "function", "tool"):
            raise BadRequest(f"{where}.role: {content['role']!r}; expected user or model", f"{where}.role")
        messages += _user(parts, unanswered, notes)
    return messages


class _Unanswered:
    """Calls without a result so far."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._by_name: dict[str, deque[str]] = {}
        """Ids in the order of the calls, also answered ones."""

    def add(self, id: str, name: str) -> None:
        self._ids.add(id)
        self._by_name.setdefault(name, deque()).append(id)

    def answer(self, name: str, id: str) -> str:
        """Return the id of the call that a result answers. A result without an id (empty) answers the oldest call of its
        name. Without such a call, its name becomes the id.
        """
        waiting = self._by_name.get(name, deque())
        while not id and waiting:
            oldest = waiting.popleft()
            id = oldest if oldest in self._ids else ""
        self._ids.discard(id or name)
        return id or name


def _answer(parts: Sequence[tuple[JsonObject, str]], unanswered: _Unanswered, position: int, notes: Notes) -> Message:
    """Return an answer of the model. Its calls are added to `unanswered`."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for part, where in parts:
        if isinstance(call := part.get("functionCall"), dict):
            name = required(call, "name", str, f"{where}.functionCall")
            id = given(call, "id", str, f"call_{position}_{len(calls)}")
            arguments = json.dumps(given(call, "args", dict, {}), ensure_ascii=False)
            calls.append(function_call(id, name, arguments))
            unanswered.add(id, name)
        elif isinstance(part.get("text"), str):
            (thoughts if part.get("thought") is True else texts).append(part["text"])
        elif part.keys() - {"thoughtSignature", "text", "thought"}:
            notes.drop(NoteKind.CONTENT, where, f"a part {_kind(part)} is not supported")
    thought = "".join(thoughts)
    return assistant("".join(texts), calls) | ({"reasoning_content": thought} if thought else {})


def _user(parts: Sequence[tuple[JsonObject, str]], unanswered: _Unanswered, notes: Notes) -> list[Message]:
    """Return the results of calls, and the user's text. An image beside results belongs to them."""
    results: list[Message] = []
    texts: list[str] = []
    for part, where in parts:
        if isinstance(response := part.get("functionResponse"), dict):
            name = required(response, "name", str, f"{where}.functionResponse")
            id = unanswered.answer(name, given(response, "id", str, ""))
            results.append({"role": "tool", "content": _result(response, where, notes), "tool_call_id": id})
        elif results and not isinstance(part.get("text"), str):
            results[-1]["content"] += "\n" + left_out(_kind(part), where, notes)
        else:
            texts.append(_text(part, where))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts else [])]


def _result(response: JsonObject, where: str, notes: Notes) -> str:
    match given(response, "response", dict, {}):
        case {"output": str(text), **others} if not others:
            pass
        case {"error": str(text), **others} if not others:
            text = text if "error" in text[:40].lower() else ERROR_PREFIX + text
        case other:
            text = json.dumps(other, ensure_ascii=False)
    media = objects(response.get("parts") or [], f"{where}.functionResponse.parts")
    return "\n".join([text, *(left_out(_kind(part), where, notes) for part in media)])


def _text(part: JsonObject, where: str) -> str:
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}: a part {_kind(part)}; this model reads text only", where)
    return str(part["text"])


def _kind(part: JsonObject) -> str:
    return next((name for name in part if name not in ("thought", "thoughtSignature")), "without content")


def _tools(tool: JsonObject, where: str, notes: Notes) -> list[JsonObject]:
    """Return the functions of a group of tools. Others run on Google's side."""
    tool = _camel_case(tool)
    for name in sorted(tool.keys() - {"functionDeclarations"}):
        notes.drop(NoteKind.TOOL, where, f"{name:.60}; only functionDeclarations are supported")
    return each(tool.get("functionDeclarations"), f"{where}.functionDeclarations", _function)


def _function(declaration: JsonObject, where: str) -> JsonObject:
    declaration = _camel_case(declaration)
    function: JsonObject = {"name": required(declaration, "name", str, where)}
    if declaration.get("description") is not None:
        function["description"] = required(declaration, "description", str, where)
    schema = declaration.get("parametersJsonSchema") or _json_schema(declaration.get("parameters"))
    return {"type": "function", "function": function | {"parameters": schema or {"type": "object", "properties": {}}}}


def _json_schema(schema: Any) -> Any:
    """Return a JSON Schema of Google's own form, whose types are in capitals."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else _json_schema(value)
        for name, value in schema.items()
    }


def _sampled_otherwise(
    body: Mapping[str, Any], config: Mapping[str, Any], thinking: Mapping[str, Any], notes: Notes
) -> JsonObject:
    """Return sampling fields with another format in chat completions, by their names there."""
    renamed = {"topK": "top_k", "presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"}
    extra = {theirs: config[ours] for ours, theirs in renamed.items() if config.get(ours) is not None}
    if isinstance(level := thinking.get("thinkingLevel"), str) and level != "THINKING_LEVEL_UNSPECIFIED":
        extra["reasoning_effort"] = level.lower()
    schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema"))
    if isinstance(schema, dict):
        extra["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    elif config.get("responseMimeType") == "application/json":
        extra["response_format"] = {"type": "json_object"}
    calling = _camel_case(given(_camel_case(given(body, "toolConfig", dict, {})), "functionCallingConfig", dict, {}))
    mode, allowed = given(calling, "mode", str, "AUTO"), given(calling, "allowedFunctionNames", list, [])
    if mode in TOOL_MODES:
        extra["tool_choice"] = TOOL_MODES[mode]
        if mode == "ANY" and len(allowed) == 1:
            extra["tool_choice"] = {"type": "function", "function": {"name": allowed[0]}}
        elif allowed:
            notes.drop(NoteKind.TOOL_CHOICE, "toolConfig.allowedFunctionNames", "only the mode is applied")
    return extra
