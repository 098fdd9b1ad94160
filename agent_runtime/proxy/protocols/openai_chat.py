"""OpenAI's chat completions (platform.openai.com/docs/api-reference/chat), with vLLM's fields for token ids. Pure."""

from collections.abc import Mapping
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, Earlier, JsonObject
from agent_runtime.proxy.conversation import REASONING_FIELDS, assistant, plain_answer
from agent_runtime.proxy.protocols.fields import (
    ENGINE_SAMPLING,
    check_known,
    each,
    given,
    one,
    refuse,
    required,
    sampling,
    typed,
)
from agent_runtime.proxy.protocols.openai_errors import ChunkEncoder, OpenAIErrors, usage
from rollout_api.records import Message

PASSED = ENGINE_SAMPLING | {
    "frequency_penalty",
    "logit_bias",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
    "verbosity",
}
HONOURED = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "parallel_tool_calls",
        "return_token_ids",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
    }
)
IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
REFUSED = {
    "audio": "the model writes text only",
    "function_call": "deprecated; use tool_choice",
    "functions": "deprecated; use tools",
    "prediction": "predicted outputs are not supported",
    "top_logprobs": "only the sampled token's logprob is recorded; leave it out",
    "web_search_options": "web search is not supported",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


class OpenAIChat(OpenAIErrors):
    """A `Translation`."""

    name = "chat"
    path = "/chat/completions"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        check_known(body, PASSED | HONOURED | IGNORED | {"modalities"} | REFUSED.keys())
        refuse(body, REFUSED)
        one(body, "n")
        if body.get("modalities") not in (None, ["text"]):
            raise BadRequest("modalities: the model writes text only; leave it out", "modalities")
        messages = each(required(body, "messages", list), "messages", parse_message)
        if not messages:
            raise BadRequest("messages: expected at least one message, got an empty list", "messages")
        choice = tool_choice(body.get("tool_choice"))
        single = {"parallel_tool_calls": False} if body.get("parallel_tool_calls") is False else {}
        return ChatRequest(
            model=required(body, "model", str),
            messages=messages,
            tools=each(body.get("tools"), "tools", parse_tool),
            sampling=sampling(
                body,
                max_tokens=("max_tokens", "max_completion_tokens"),
                stop="stop",
                extra=choice | single,
                passed=PASSED,
            ),
            seed=typed(body["seed"], int, "seed") if body.get("seed") is not None else None,
            stream=given(body, "stream", bool, False),
            extra={
                "usage": bool(given(body, "stream_options", dict, {}).get("include_usage")),
                "logprobs": given(body, "logprobs", bool, False),
                "ids": given(body, "return_token_ids", bool, False),
            },
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        reply = answer.reply
        choice = {
            "index": 0,
            "message": {"content": None, "refusal": None, **answer_message(reply.message)},
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

    def start(self) -> bytes:
        return self._delta(role="assistant", content="")

    def text(self, piece: str) -> bytes:
        self._sent.add(piece)
        return self._delta(content=piece)

    def end(self, answer: ChatAnswer) -> bytes:
        reply, chunks = answer.reply, []
        message = answer_message(reply.message)
        for name in message.keys() - {"role", "content", "tool_calls"}:
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


def parse_message(message: JsonObject, where: str) -> Message:
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
    parsed["content"] = parse_text(message.get("content"), f"{where}.content", "\n")
    if role == "tool":
        parsed["tool_call_id"] = required(message, "tool_call_id", str, where)
    if message.get("name") is not None:
        parsed["name"] = required(message, "name", str, where)
    return parsed


def answer_message(message: Message) -> Message:
    """Return an answer for the client, with complete tool calls and the server's other fields."""
    plain = plain_answer(message)
    return {name: value for name, value in message.items() if value is not None and name != "tool_calls"} | plain


def parse_text(content: Any, where: str, joint: str) -> str:
    """Return the text of a message: a string, or a list of text parts. Raises BadRequest for images and everything
    else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return joint.join(each(typed(content, list, where), where, _part_text))


def _part_text(part: JsonObject, where: str) -> str:
    kind = required(part, "type", str, where)
    if kind not in ("text", "refusal", "input_text", "output_text"):
        raise BadRequest(f"{where}: a part of type {kind!r}; this model reads text only", where)
    return required(part, "refusal" if kind == "refusal" else "text", str, where)


def parse_call(call: JsonObject, where: str) -> JsonObject:
    """Parse a tool call of an earlier answer. Raises BadRequest."""
    if call.get("type", "function") != "function":
        raise BadRequest(f"{where}.type: {call['type']!r}; only function is supported", f"{where}.type")
    function = required(call, "function", dict, where)
    return {
        "id": required(call, "id", str, where),
        "type": "function",
        "function": {
            "name": required(function, "name", str, f"{where}.function"),
            "arguments": required(function, "arguments", str, f"{where}.function"),
        },
    }


def parse_tool(tool: JsonObject, where: str) -> JsonObject:
    """Parse a tool definition. Raises BadRequest for tools that are not functions."""
    if tool.get("type") != "function":
        raise BadRequest(f"{where}.type: {tool.get('type')!r}; only function tools are supported", f"{where}.type")
    required(required(tool, "function", dict, where), "name", str, f"{where}.function")
    return tool


def tool_choice(choice: Any) -> JsonObject:
    """Return the choice of tools for `Sampling.extra`; `auto` is the default."""
    if choice is None or choice == "auto":
        return {}
    named = isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict)
    if choice not in ("none", "required") and not named:
        raise BadRequest(
            f"tool_choice: {choice!r:.100}; expected none, auto, required, or an object that names a function",
            "tool_choice",
        )
    return {"tool_choice": choice}


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
