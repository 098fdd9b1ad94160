"""OpenAI's routes: models, chat completions, completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support.vllm_server import answering, asking, reasoning_parser
from tests.support.vllm_server.answering import AnswerText
from tests.support.vllm_server.context import server_of
from tests.support.vllm_server.engine import Request
from tests.support.vllm_server.errors import ApiError, json_object
from tests.support.vllm_server.tokenizer import tokenizer
from tests.support.vllm_server.tool_parser import ToolCallStream, parse

if TYPE_CHECKING:
    from tests.support.vllm_server.server import VllmStandIn

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def models(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/openai/models/api_router.py: show_available_models."""
    server = server_of(http)

    def card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(server.started),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": length,
        }

    cards = [card(server.model, server.model, None, server.max_model_len)]
    cards += [card(name, found.path, server.model, None) for name, found in server.weights.adapters.items()]
    return web.json_response({"object": "list", "data": cards})


@routes.post("/v1/chat/completions")
async def chat_completions(http: web.Request) -> web.StreamResponse:
    """vLLM 0.26, vllm/entrypoints/openai/chat_completion/serving.py: OpenAIServingChat.create_chat_completion."""
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    ids = asking.chat_ids(server, body)
    asked = body.get("max_completion_tokens")
    max_tokens = asking.limit(server, ids, body.get("max_tokens") if asked is None else asked)
    asking.structured_outputs(body.get("response_format"))
    request = asking.engine_request(server, http, body, body, prefix="chatcmpl-", ids=ids, max_tokens=max_tokens)
    wanted = asking.wanted(server, body, int(body.get("top_logprobs") or 0) if body.get("logprobs") else None)
    if wanted.stream:
        return await answering.stream(server, http, request, _chat_events(server, body, request, wanted))
    await answering.whole(server, http, request)
    with_tools = takes_tools(server, body)
    before = tokenizer().decode(request.prompt_ids, special=True) if server.reasoning_parser is not None else None
    message, called = chat_message(answering.text_of(request), before, with_tools=with_tools)
    as_ids = bool(body.get("return_tokens_as_token_ids"))
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None
        if wanted.logprobs is None
        else answering.chat_logprobs(request.ids, request.logprobs, wanted.logprobs, as_ids=as_ids),
        "finish_reason": "tool_calls" if called and request.finish == "stop" else request.finish,
        "stop_reason": request.stopped_by,
        "token_ids": request.ids if wanted.token_ids else None,
    }
    return web.json_response(
        {
            **_head(request, "chat.completion", body, server),
            "choices": [choice],
            "usage": answering.usage(request),
            "prompt_logprobs": None,
            "prompt_token_ids": request.prompt_ids if wanted.token_ids else None,
            "kv_transfer_params": None,
        }
    )


def takes_tools(server: VllmStandIn, body: Mapping[str, Any]) -> bool:
    """Whether the answer is searched for tool calls."""
    return bool(server.tool_parser and body.get("tools")) and body.get("tool_choice") != "none"


def chat_message(text: str, prompt: str | None, *, with_tools: bool) -> tuple[dict[str, Any], bool]:
    """Return the message of a text, and whether it calls tools. Ids of calls are new each time, as in vLLM.

    `prompt` is the text before it, if reasoning is parsed.
    """
    reasoning, content = (None, text) if prompt is None else reasoning_parser.parse(prompt, text)
    content, calls = parse(content) if with_tools and content else (content, [])
    message = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [{"id": call_id(), "type": "function", "function": call} for call in calls],
        "reasoning": reasoning,
    }
    return message, bool(calls)


def call_id() -> str:
    """vLLM 0.26, vllm/entrypoints/chat_utils.py: make_tool_call_id."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


async def _chat_events(
    server: VllmStandIn, body: Mapping[str, Any], request: Request, wanted: asking.Wanted
) -> AsyncIterator[bytes]:
    head = _head(request, "chat.completion.chunk", body, server)
    tools = ToolCallStream() if takes_tools(server, body) else None
    text = AnswerText(request)
    as_ids = bool(body.get("return_tokens_as_token_ids"))
    first = True
    async for start, end, finish in answering.pieces(request):
        if first:
            first = False
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield answering.event(
                {**head, "choices": [role], "prompt_token_ids": request.prompt_ids if wanted.token_ids else None}
            )
        piece = text.feed(request.ids[start:end], finish)
        deltas = [{"content": piece}] if tools is None else tools.feed(piece, final=finish is not None)
        if not deltas and finish is None and (server.drops_streamed_ids or not wanted.token_ids):
            continue
        for position, delta in enumerate(deltas or [{}]):
            last = position == max(len(deltas) - 1, 0)
            for call in delta.get("tool_calls", ()):
                if "name" in call["function"]:
                    call |= {"id": call_id(), "type": "function"}
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            if last:
                if wanted.logprobs is not None and start < end:
                    choice["logprobs"] = answering.chat_logprobs(
                        request.ids[start:end], request.logprobs[start:end], wanted.logprobs, as_ids=as_ids
                    )
                called = tools is not None and tools.calls and finish == "stop"
                choice["finish_reason"] = "tool_calls" if called else finish
                choice["token_ids"] = request.ids[start:end] if wanted.token_ids else None
                if finish is not None:
                    choice["stop_reason"] = request.stopped_by
            yield answering.event({**head, "choices": [choice]})
    if wanted.usage:
        yield answering.event({**head, "choices": [], "usage": answering.usage(request)})


@routes.post("/v1/completions")
async def completions(http: web.Request) -> web.StreamResponse:
    """vLLM 0.26, vllm/entrypoints/openai/completion/serving.py: OpenAIServingCompletion.create_completion.

    A prompt is a text or a list of token ids, one to a request.
    """
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    ids = prompt_ids(server, body.get("prompt"))
    max_tokens = asking.limit(server, ids, body.get("max_tokens", asking.COMPLETION_MAX_TOKENS))
    asking.structured_outputs(body.get("response_format"))
    request = asking.engine_request(server, http, body, body, prefix="cmpl-", ids=ids, max_tokens=max_tokens)
    logprobs = body.get("logprobs")
    wanted = asking.wanted(server, body, None if logprobs is None else int(logprobs))
    if wanted.stream:
        return await answering.stream(server, http, request, _completion_events(server, body, request, wanted))
    await answering.whole(server, http, request)
    choice = _completion_choice(request, wanted, answering.text_of(request), 0, len(request.ids), request.finish, 0)
    head = _head(request, "text_completion", body, server)
    return web.json_response(
        {**head, "choices": [choice], "usage": answering.usage(request), "kv_transfer_params": None}
    )


def prompt_ids(server: VllmStandIn, prompt: Any) -> list[int]:
    """Return the ids of a completion's prompt. Raises ApiError."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokenizer().encode(prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise ApiError("prompt: the stand-in takes one prompt to a request", param="prompt")
    return asking.checked_ids(server, prompt, "prompt")


def _completion_choice(
    request: Request, wanted: asking.Wanted, text: str, start: int, end: int, finish: str | None, offset: int
) -> dict[str, Any]:
    ids, logprobs = request.ids[start:end], request.logprobs[start:end]
    return {
        "index": 0,
        "text": text,
        "logprobs": None if wanted.logprobs is None else answering.completion_logprobs(ids, logprobs, offset),
        "finish_reason": finish,
        "stop_reason": request.stopped_by if finish else None,
        "token_ids": ids if wanted.token_ids else None,
        "prompt_token_ids": request.prompt_ids if wanted.token_ids and start == 0 else None,
    }


async def _completion_events(
    server: VllmStandIn, body: Mapping[str, Any], request: Request, wanted: asking.Wanted
) -> AsyncIterator[bytes]:
    head = _head(request, "text_completion", body, server)
    text, offset = AnswerText(request), 0
    async for start, end, finish in answering.pieces(request):
        piece = text.feed(request.ids[start:end], finish)
        choice = _completion_choice(request, wanted, piece, start, end, finish, offset)
        offset += len(piece)
        yield answering.event({**head, "choices": [choice]})
    if wanted.usage:
        yield answering.event({**head, "choices": [], "usage": answering.usage(request)})


def _head(request: Request, kind: str, body: Mapping[str, Any], server: VllmStandIn) -> dict[str, Any]:
    return {"id": request.id, "object": kind, "created": int(time.time()), "model": body.get("model") or server.model}
