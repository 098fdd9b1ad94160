"""OpenAI's chat completions (platform.openai.com/docs/api-reference/chat), with vLLM's fields for token ids. Pure."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from agent_runtime.models.answers import REASONING_FIELDS, reasoning_of
from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, Earlier, JsonObject, NoteKind
from agent_runtime.proxy.conversation import assistant, decoded_arguments, plain_answer
from agent_runtime.proxy.protocols.fields import (
    ENGINE_SAMPLING,
    Fields,
    Notes,
    each,
    fitting_choice,
    given,
    one,
    required,
    sampling,
    typed,
    words,
)
from agent_runtime.proxy.protocols.openai_errors import ChunkEncoder, OpenAIErrors, usage
from rollout_api.records import Message

IGNORED = words(
    "metadata moderation priority prompt_cache_key prompt_cache_options prompt_cache_retention request_id "
    "safety_identifier service_tier store user"
)
FIELDS = Fields(
    honoured=words(
        "logprobs max_completion_tokens max_tokens messages modalities model n parallel_tool_calls return_token_ids seed "
        "stop stream stream_options temperature tool_choice tools top_p"
    ),
    passed=ENGINE_SAMPLING
    | words("frequency_penalty logit_bias presence_penalty reasoning_effort response_format verbosity"),
    ignored=IGNORED,
    dropped={
        "audio": "the model writes text only",
        "function_call": "deprecated; use tool_choice",
        "functions": "deprecated; use tools",
        "prediction": "predicted outputs are not supported",
        "top_logprobs": "only the sampled token's logprob is recorded",
        "web_search_options": "web search is not supported",
    },
    refused={"continue_final_message": "this model does not continue a partial answer; end with a user message"},
)
ROLES = ("system", "developer", "user", "assistant", "tool")

TEXT_INPUT = "input"
"""The argument that holds the text of a call of a custom tool."""


class OpenAIChat(OpenAIErrors):
    """A `Translation`."""

    name = "chat"
    path = "/chat/completions"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        notes = Notes()
        if body.get("reasoning_effort") == "default":
            # Harbor's word for the model's own effort, which vLLM refuses.
            body = {**body, "reasoning_effort": None}
        unknown = FIELDS.check(body, notes, passes_unknown=True)
        one(body, "n")
        if body.get("modalities") not in (None, ["text"]):
            notes.drop(NoteKind.FIELD, "modalities", "the model writes text only")
        messages = each(required(body, "messages", list), "messages", partial(parse_message, notes=notes))
        if not messages:
            raise BadRequest("messages: expected at least one message, got an empty list", "messages")
        tools = each(body.get("tools"), "tools", partial(parse_tool, notes=notes))
        choice = fitting_choice(tool_choice(body.get("tool_choice"), notes), tools, notes)
        single = {"parallel_tool_calls": False} if body.get("parallel_tool_calls") is False else {}
        return ChatRequest(
            model=required(body, "model", str),
            messages=messages,
            tools=tools,
            sampling=sampling(
                body,
                max_tokens=("max_tokens", "max_completion_tokens"),
                stop="stop",
                extra=choice | single,
                passed=FIELDS.passed | unknown,
            ),
            seed=typed(body["seed"], int, "seed") if body.get("seed") is not None else None,
            stream=given(body, "stream", bool, False),
            extra={
                "usage": bool(given(body, "stream_options", dict, {}).get("include_usage")),
                "logprobs": given(body, "logprobs", bool, False),
                "ids": given(body, "return_token_ids", bool, False),
                "custom": frozenset(
                    tool["custom"]["name"] for tool in body.get("tools") or [] if tool.get("type") == "custom"
                ),
            },
            notes=notes.all,
            unknown=unknown,
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        reply = answer.reply
        choice = {
            "index": 0,
            "message": {"content": None, "refusal": None, **answer_message(reply.message, request.extra["custom"])},
            "logprobs": logprobs(reply) if request.extra["logprobs"] else None,
            "finish_reason": finish_reason(reply),
        }
        body = {
            **_head(request, answer.id, answer.created, "chat.completion"),
            "choices": [choice],
            "usage": usage(reply),
        }
        if request.extra["ids"]:
            choice["token_ids"], body["prompt_token_ids"] = reply.completion_token_ids, reply.prompt_token_ids
        return body

    def encoder(self, request: ChatRequest, id: str, created: int) -> "ChatEncoder":
        return ChatEncoder(request, _head(request, id, created, "chat.completion.chunk"))


class ChatEncoder(ChunkEncoder):
    """Chunks of a streamed chat completion; see `Encoder`."""

    def start(self, prompt_tokens: int) -> bytes:
        return self._delta(role="assistant", content="")

    def reasoning(self, piece: str) -> bytes:
        self._thought.add(piece)
        return self._delta(**dict.fromkeys(REASONING_FIELDS, piece))

    def text(self, piece: str) -> bytes:
        self._sent.add(piece)
        return self._delta(content=piece)

    def end(self, answer: ChatAnswer) -> bytes:
        reply, chunks = answer.reply, []
        message = answer_message(reply.message, self._extra["custom"])
        if thought := self._thought.missing(reasoning_of(message)):
            chunks.append(self.reasoning(thought))
        for name in message.keys() - {"role", "content", "tool_calls", *REASONING_FIELDS}:
            chunks.append(self._delta(**{name: message[name]}))
        if rest := self._sent.rest(reply.text):
            chunks.append(self._delta(content=rest))
        if calls := message.get("tool_calls"):
            chunks.append(self._delta(tool_calls=[{"index": i, **call} for i, call in enumerate(calls)]))
        last: JsonObject = {"delta": {}, "logprobs": None, "finish_reason": finish_reason(reply)}
        if self._extra["logprobs"]:
            last["logprobs"] = logprobs(reply)
        prompt: JsonObject = {}
        if self._extra["ids"]:
            last["token_ids"], prompt = reply.completion_token_ids, {"prompt_token_ids": reply.prompt_token_ids}
        return b"".join([*chunks, self._chunk(last, **prompt), self._end(reply)])

    def _delta(self, **delta: Any) -> bytes:
        return self._chunk({"delta": delta, "logprobs": None, "finish_reason": None})


def _head(request: ChatRequest, id: str, created: int, form: str) -> JsonObject:
    return {"id": f"chatcmpl-{id}", "object": form, "created": created, "model": request.model}


def parse_message(message: JsonObject, where: str, notes: Notes) -> Message:
    """Return a message of the request without null or empty fields. Raises BadRequest."""
    role = required(message, "role", str, where)
    if role not in ROLES:
        raise BadRequest(f"{where}.role: {role!r}; expected one of {', '.join(ROLES)}", f"{where}.role")
    if role == "assistant":
        calls = each(message.get("tool_calls"), f"{where}.tool_calls", parse_call)
        thought = {name: required(message, name, str, where) for name in REASONING_FIELDS if message.get(name)}
        return assistant(parse_text(message.get("content"), f"{where}.content", ""), calls) | thought
    # Chat templates do not support `developer`, OpenAI's newer word for system.
    parsed: Message = {"role": "system" if role == "developer" else role}
    dropping = notes if role == "tool" else None
    parsed["content"] = parse_text(message.get("content"), f"{where}.content", "\n", dropping)
    if role == "tool":
        parsed["tool_call_id"] = required(message, "tool_call_id", str, where)
    if message.get("name") is not None:
        parsed["name"] = required(message, "name", str, where)
    return parsed


def answer_message(message: Message, custom: Collection[str] = ()) -> Message:
    """Return an answer for the client, with complete tool calls and the server's other fields. `custom` are the names
    of the custom tools.
    """
    plain = plain_answer(message)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [custom_call(call) if call["function"]["name"] in custom else call for call in calls]
    thought = reasoning_of(message)
    both = dict.fromkeys(REASONING_FIELDS, thought) if thought else {}
    return {name: value for name, value in message.items() if value is not None and name != "tool_calls"} | both | plain


def parse_text(content: Any, where: str, joint: str, notes: Notes | None = None) -> str:
    """Return the text of a message: a string, or a list of text parts. A text replaces each other part, with a note.
    Without `notes`, raises BadRequest for images and everything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return joint.join(each(typed(content, list, where), where, partial(_part_text, notes=notes)))


def _part_text(part: JsonObject, where: str, notes: Notes | None) -> str:
    kind = required(part, "type", str, where)
    if kind in ("text", "refusal", "input_text", "output_text"):
        return required(part, "refusal" if kind == "refusal" else "text", str, where)
    if notes is None:
        raise BadRequest(f"{where}: a part of type {kind!r}; this model reads text only", where)
    return left_out(kind.removeprefix("input_").removesuffix("_url"), where, notes)


def left_out(kind: str, where: str, notes: Notes) -> str:
    """Return the text that stands for a dropped part of a tool's result, so that the model does not take it for
    nothing.
    """
    notes.drop(NoteKind.CONTENT, where, f"{kind:.40}; this model reads text only")
    return f"[{kind:.40} left out: this model reads text only]"


def parse_call(call: JsonObject, where: str) -> JsonObject:
    """Parse a tool call of an earlier answer. Raises BadRequest."""
    kind = call.get("type", "function")
    if kind == "custom":
        tool = required(call, "custom", dict, where)
        name, text = (required(tool, field, str, f"{where}.custom") for field in ("name", "input"))
        return function_call(required(call, "id", str, where), name, custom_arguments(text))
    if kind != "function":
        raise BadRequest(f"{where}.type: {kind!r}; expected function or custom", f"{where}.type")
    function = required(call, "function", dict, where)
    return function_call(
        required(call, "id", str, where),
        required(function, "name", str, f"{where}.function"),
        required(function, "arguments", str, f"{where}.function"),
    )


def function_call(id: str, name: str, arguments: str) -> JsonObject:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({TEXT_INPUT: text}, ensure_ascii=False)


def custom_text(arguments: str) -> str:
    """Return the text of a call of a custom tool; all arguments if the model did not write the only one that there is."""
    text = decoded_arguments(arguments).get(TEXT_INPUT)
    return text if isinstance(text, str) else arguments


def custom_call(call: JsonObject) -> JsonObject:
    function = call["function"]
    tool = {"name": function["name"], "input": custom_text(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": tool}


def custom_function(tool: JsonObject, where: str) -> JsonObject:
    """Return the function that stands for a custom tool, whose input is text and not JSON. Raises BadRequest."""
    form = given(tool, "format", dict, {})
    grammar = given(form, "grammar", dict, form)
    described = [given(tool, "description", str, "")]
    if form.get("type") == "grammar":
        described.append(f"The input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}")
    return {
        "name": required(tool, "name", str, where),
        "description": "\n".join(filter(None, described)),
        "parameters": {"type": "object", "properties": {TEXT_INPUT: {"type": "string"}}, "required": [TEXT_INPUT]},
    }


def parse_tool(tool: JsonObject, where: str, notes: Notes) -> JsonObject | None:
    """Parse a tool definition; None for a tool that the model cannot call. Raises BadRequest."""
    kind = required(tool, "type", str, where)
    if kind == "custom":
        return {"type": "function", "function": custom_function(required(tool, "custom", dict, where), where)}
    if kind != "function":
        notes.drop(NoteKind.TOOL, where, f"{kind:.60}; only function and custom tools are supported")
        return None
    required(required(tool, "function", dict, where), "name", str, f"{where}.function")
    return tool


def tool_choice(choice: Any, notes: Notes) -> JsonObject:
    """Return the choice of tools for `Sampling.extra`; `auto` is the default. Raises BadRequest."""
    match choice:
        case None | "auto":
            return {}
        case "none" | "required" | {"type": "function", "function": {}}:
            return {"tool_choice": choice}
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"tool_choice": {"type": "function", "function": {"name": name}}}
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode}}:
            # Fewer tools would be another prompt, which would not continue the conversation's tokens.
            notes.drop(NoteKind.TOOL_CHOICE, "tool_choice.allowed_tools", "only its mode is applied")
            return tool_choice(mode, notes)
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            notes.drop(NoteKind.TOOL_CHOICE, "tool_choice", f"{kind:.60} is not supported")
            return {}
    raise BadRequest(
        f"tool_choice: {choice!r:.100}; expected none, auto, required, or an object that names a function",
        "tool_choice",
    )


def finish_reason(reply: ModelReply) -> str:
    """Return OpenAI's finish reason. Servers report `stop` for tool calls that a choice forced."""
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def logprobs(reply: ModelReply) -> JsonObject | None:
    if reply.logprobs is None or reply.completion_token_ids is None:
        return None
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(reply.completion_token_ids, reply.logprobs, strict=True)
        ],
        "refusal": None,
    }
