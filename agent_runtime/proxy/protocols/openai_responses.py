"""OpenAI's Responses (platform.openai.com/docs/api-reference/responses): items instead of messages. Pure."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agent_runtime.proxy.chat import BadRequest, ChatAnswer, ChatRequest, Earlier, ErrorKind, JsonObject, NoteKind
from agent_runtime.proxy.protocols.fields import (
    ENGINE_SAMPLING,
    Fields,
    Notes,
    each,
    fitting_choice,
    given,
    objects,
    required,
    sampling,
    words,
)
from agent_runtime.proxy.protocols.openai_chat import custom_function, tool_choice
from agent_runtime.proxy.protocols.openai_errors import OpenAIErrors
from agent_runtime.proxy.protocols.responses_items import (
    ANSWER_PREFIX,
    ResponsesEncoder,
    output_items,
    parse_items,
    whole_response,
)
from rollout_api.records import Message

INSTRUCTED = "_i"
"""Suffix of the id of a response whose conversation begins with instructions, which apply to one response only."""

FIELDS = Fields(
    honoured=words(
        "input instructions max_output_tokens model parallel_tool_calls previous_response_id reasoning stream temperature "
        "text tool_choice tools top_p"
    ),
    passed=ENGINE_SAMPLING,
    ignored=words(
        "access_programs client_metadata context_management include max_tool_calls metadata moderation prompt_cache_key "
        "prompt_cache_options prompt_cache_retention safety_identifier service_tier store stream_options truncation user"
    ),
    dropped={
        "background": "the response is made while the client waits",
        "image": "the model writes text only",
        "personality": "instructions set the model's manner here",
        "top_logprobs": "logprobs are recorded, but only chat completions returns them",
    },
    refused={
        "conversation": "give previous_response_id, or the whole input, instead",
        "prompt": "prompt templates are not stored here; give instructions and input",
    },
)
ECHOED: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}


class OpenAIResponses(OpenAIErrors):
    """A `Translation`."""

    name = "responses"
    path = "/responses"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        notes = Notes()
        FIELDS.check(body, notes)
        instructions = given(body, "instructions", str, "")
        head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        messages = head + _previous(body, earlier) + parse_items(_input(body), "input", earlier, notes)
        if len(messages) == len(head):
            raise BadRequest("input: expected at least one item, got none", "input")
        tools = each(body.get("tools"), "tools", partial(_tool, notes=notes))
        extra = fitting_choice(_sampled_otherwise(body, notes), tools, notes)
        return ChatRequest(
            model=required(body, "model", str),
            messages=messages,
            tools=tools,
            sampling=sampling(body, max_tokens=("max_output_tokens",), stop=None, extra=extra, passed=FIELDS.passed),
            stream=given(body, "stream", bool, False),
            extra={
                "echo": {name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()},
                "suffix": INSTRUCTED if instructions else "",
                "custom": frozenset(tool["name"] for tool in body.get("tools") or [] if tool.get("type") == "custom"),
            },
            notes=notes.all,
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        return whole_response(
            request,
            answer,
            output_items(answer.reply.message, answer.id, answer.reply.finish_reason, request.extra["custom"]),
        )

    def encoder(self, request: ChatRequest, id: str, created: int) -> ResponsesEncoder:
        return ResponsesEncoder(request, id, created)


def _input(body: Mapping[str, Any]) -> Sequence[JsonObject]:
    value = body.get("input")
    return [{"role": "user", "content": value}] if isinstance(value, str) else objects(value or [], "input")


def _previous(body: Mapping[str, Any], earlier: Earlier) -> list[Message]:
    """Return the conversation that the request continues, without the instructions of its previous request."""
    id = given(body, "previous_response_id", str, "")
    if not id:
        return []
    messages = earlier(answer_id(id))
    if messages is None:
        raise BadRequest(
            f"previous_response_id: {id!r} is not a response of this session; send the whole conversation as input",
            "previous_response_id",
            ErrorKind.PREVIOUS_NOT_FOUND,
        )
    return list(messages[instructed(id) :])


def answer_id(id: str) -> str:
    """Return the id of the answer (`ChatAnswer.id`) of a response."""
    return id.removeprefix(ANSWER_PREFIX).removesuffix(INSTRUCTED)


def instructed(id: str) -> bool:
    """Whether the response's conversation begins with instructions."""
    return id.endswith(INSTRUCTED)


def _tool(tool: JsonObject, where: str, notes: Notes) -> JsonObject | None:
    """Parse a tool definition; None for a tool that is only available at OpenAI."""
    kind = required(tool, "type", str, where)
    if kind == "custom":
        return {"type": "function", "function": custom_function(tool, where)}
    if kind != "function":
        notes.drop(NoteKind.TOOL, where, f"{kind:.60}; only function and custom tools are supported")
        return None
    required(tool, "name", str, where)
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _sampled_otherwise(body: Mapping[str, Any], notes: Notes) -> JsonObject:
    """Return sampling fields with another format in chat completions, by their names there."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": required(choice, "name", str, "tool_choice")}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": choice}
    extra = tool_choice(choice, notes)
    if body.get("parallel_tool_calls") is False:
        extra["parallel_tool_calls"] = False
    if effort := given(body, "reasoning", dict, {}).get("effort"):
        extra["reasoning_effort"] = effort
    text = given(body, "text", dict, {})
    if text.get("verbosity"):
        extra["verbosity"] = text["verbosity"]
    form = given(text, "format", dict, {"type": "text"})
    if form.get("type") == "json_schema":
        schema = {
            name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None
        }
        extra["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form.get("type") != "text":
        extra["response_format"] = form
    return extra
