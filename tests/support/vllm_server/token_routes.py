"""Tokens in, tokens out: tokenize, detokenize, render, generate, derender."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support.vllm_server import answering, asking
from tests.support.vllm_server.context import server_of
from tests.support.vllm_server.engine import Request
from tests.support.vllm_server.errors import ApiError, json_object
from tests.support.vllm_server.experts import ROW_BYTES, experts_by, npy
from tests.support.vllm_server.openai_routes import chat_message, prompt_ids, takes_tools
from tests.support.vllm_server.tokenizer import TextStream, tokenizer

if TYPE_CHECKING:
    from tests.support.vllm_server.server import VllmStandIn

routes = web.RouteTableDef()
scale_out_routes = web.RouteTableDef()

# Of a chat or completion request, what becomes a sampling parameter under the same name.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
)


async def disabled_scale_out(_: web.Request) -> web.Response:
    """vLLM 0.32, vllm/entrypoints/scale_out/factories.py: register_scale_out_api_routers."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    raise ApiError(message, 403, "PermissionDeniedError")


@routes.post("/tokenize")
async def tokenize(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/tokenize/api_router.py: tokenize; takes a prompt's text, or messages and tools."""
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    ids = asking.chat_ids(server, body) if "messages" in body else tokenizer().encode(str(body.get("prompt", "")))
    strings = [tokenizer().decode([token], special=True) for token in ids] if body.get("return_token_strs") else None
    return web.json_response(
        {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids, "token_strs": strings}
    )


@routes.post("/detokenize")
async def detokenize(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/tokenize/api_router.py: detokenize; special tokens are included."""
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    ids = body.get("tokens")
    if ids != []:
        ids = asking.checked_ids(server, ids, "tokens")
    return web.json_response({"prompt": tokenizer().decode(ids, special=True)})


@scale_out_routes.post("/v1/chat/completions/render")
async def render_chat(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/scale_out/render/serving.py: ServingRender.render_chat_request.

    Takes a chat request; answers with the body for /inference/v1/generate.
    """
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    ids = asking.chat_ids(server, body)
    asked = body.get("max_completion_tokens")
    max_tokens = asking.limit(server, ids, body.get("max_tokens") if asked is None else asked)
    logprobs = int(body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return web.json_response(_generate_body(body, "chatcmpl-", ids, max_tokens, logprobs))


@scale_out_routes.post("/v1/completions/render")
async def render_completion(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/scale_out/render/serving.py: render_completion_request; answers with a list."""
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    ids = prompt_ids(server, body.get("prompt"))
    max_tokens = asking.limit(server, ids, body.get("max_tokens", asking.COMPLETION_MAX_TOKENS))
    return web.json_response([_generate_body(body, "cmpl-", ids, max_tokens, body.get("logprobs"))])


def _generate_body(
    body: Mapping[str, Any], prefix: str, ids: list[int], max_tokens: int, logprobs: int | None
) -> dict[str, Any]:
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    if wanted := asking.structured_outputs(body.get("response_format")):
        sampling["structured_outputs"] = wanted
    return {
        "request_id": f"{prefix}{uuid.uuid4().hex}",
        "token_ids": ids,
        "features": None,
        "sampling_params": {**sampling, "n": 1, "max_tokens": max_tokens, "logprobs": logprobs},
        "model": body.get("model"),
        "stream": bool(body.get("stream")),
        "stream_options": body.get("stream_options") if body.get("stream") else None,
        "cache_salt": body.get("cache_salt"),
        "priority": body.get("priority") or 0,
        "kv_transfer_params": None,
    }


@scale_out_routes.post("/inference/v1/generate")
async def generate(http: web.Request) -> web.StreamResponse:
    """vLLM 0.26, vllm/entrypoints/scale_out/token_in_token_out/serving.py: ServingTokens.serve_tokens.

    `max_tokens` beyond the context is no error here: the answer ends with `length` where the context does.
    """
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise ApiError("sampling_params: Field required", param="sampling_params")
    ids = asking.checked_ids(server, body.get("token_ids"), "token_ids")
    most = server.max_model_len - len(ids)
    asked = sampling.get("max_tokens")
    max_tokens = most if asked is None else min(asking.at_least_one(asked), most)
    request = asking.engine_request(
        server, http, body, sampling, prefix="generate-tokens-", ids=ids, max_tokens=max_tokens
    )
    if not 0 <= (sampling.get("routed_experts_prompt_start") or 0) <= len(ids):
        raise ApiError(
            f"routed_experts_prompt_start must be between 0 and the prompt length ({len(ids)}), inclusive.",
            param="routed_experts_prompt_start",
        )
    logprobs = sampling.get("logprobs")
    wanted = asking.wanted(server, body, None if logprobs is None else int(logprobs))
    if wanted.stream:
        return await answering.stream(server, http, request, _generate_events(server, request, wanted))
    await answering.whole(server, http, request)
    choice = _choice(request, wanted, 0, len(request.ids), request.finish) | _at_the_end(server, request)
    return web.json_response(
        {
            "request_id": request.id,
            "model": body.get("model") or server.model,
            "created": int(time.time()),
            "choices": [choice],
            "usage": answering.usage(request),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
    )


def _choice(request: Request, wanted: asking.Wanted, start: int, end: int, finish: str | None) -> dict[str, Any]:
    logprobs = None
    if wanted.logprobs is not None:
        logprobs = answering.generate_logprobs(request.ids[start:end], request.logprobs[start:end])
    return {"index": 0, "logprobs": logprobs, "finish_reason": finish, "token_ids": request.ids[start:end]}


def _at_the_end(server: VllmStandIn, request: Request) -> dict[str, Any]:
    """vLLM 0.32, docs/serving/online_serving/token_in_token_out.md: sent with the last token of a choice."""
    found: dict[str, Any] = {}
    if server.weight_versions:
        found["weight_versions"] = [
            {"version": label, "start": start, "end": end} for label, start, end in request.labels
        ]
    if server.routed_experts:
        # Of all tokens that were processed: all but the last.
        rows = experts_by(server.weights.version, [*request.prompt, *request.ids[:-1]])
        first = request.sampling.get("routed_experts_prompt_start") or 0
        found["routed_experts"] = npy(rows[first * ROW_BYTES :])
    return found


async def _generate_events(server: VllmStandIn, request: Request, wanted: asking.Wanted) -> AsyncIterator[bytes]:
    async for start, end, finish in answering.pieces(request):
        # vLLM 0.26 sends nothing for an output without tokens: of an abort, a stream tells only that it has ended.
        if start < end or (server.weight_versions and finish is not None):
            choice = _choice(request, wanted, start, end, finish)
            if finish is not None:
                choice |= _at_the_end(server, request)
            yield answering.event({"request_id": request.id, "choices": [choice], "usage": None})
    if wanted.usage:
        yield answering.event({"request_id": request.id, "choices": [], "usage": answering.usage(request)})


@scale_out_routes.post("/v1/chat/completions/derender")
async def derender_chat(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/scale_out/derender/serving.py: ServingDerender.derender_chat_response.

    Takes {model, generate_response, prompt_tokens, chat_request}; `finish_reason` is passed on as the engine gave it, so
    it is `stop` where /v1/chat/completions says `tool_calls`.
    """
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    generated, asked = body.get("generate_response"), body.get("chat_request")
    if not isinstance(generated, dict):
        raise ApiError("generate_response: Field required", param="generate_response")
    _no_stream(body)
    has_parser = server.tool_parser or server.reasoning_parser is not None
    if has_parser and asked is None:
        raise ApiError("chat_request is required when a tool or reasoning parser is configured", param="chat_request")
    choices: list[dict[str, Any]] = []
    before = None
    if server.reasoning_parser is not None:
        before = tokenizer().decode(generated.get("prompt_token_ids") or [], special=True)
    for choice, ids in _generated(server, generated):
        # For its parser it decodes special tokens as well, the one that closed the answer among them.
        special = has_parser or not (asked or {}).get("skip_special_tokens", True)
        text = TextStream(tokenizer(), special=special).feed(ids)
        message, _ = chat_message(text, before, with_tools=takes_tools(server, asked or {}))
        choices.append(
            {
                "index": choice.get("index", 0),
                "message": message,
                "logprobs": _with_text(choice.get("logprobs")),
                "finish_reason": choice.get("finish_reason"),
                "stop_reason": None,
                "token_ids": None,
            }
        )
    prompt = int(body.get("prompt_tokens") or 0)
    return web.json_response(_derendered(server, body, [generated], "chat.completion", choices, prompt))


@scale_out_routes.post("/v1/completions/derender")
async def derender_completion(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/scale_out/derender/serving.py: ServingDerender.derender_completion_response."""
    server = server_of(http)
    body = await json_object(http)
    asking.adapter_of(server, body.get("model"))
    responses = body.get("generate_responses")
    if not isinstance(responses, list) or not responses:
        raise ApiError("generate_responses must not be empty", param="generate_responses")
    _no_stream(body)
    counts = body.get("prompt_tokens")
    if counts is not None and len(counts) != len(responses):
        raise ApiError(f"prompt_tokens length ({len(counts)}) must equal generate_responses length ({len(responses)})")
    choices = [
        {
            "index": position,
            "text": TextStream(tokenizer()).feed(ids),
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
            "stop_reason": None,
        }
        for position, (choice, ids) in enumerate(
            found for response in responses for found in _generated(server, response)
        )
    ]
    return web.json_response(_derendered(server, body, responses, "text_completion", choices, sum(counts or ())))


def _no_stream(body: Mapping[str, Any]) -> None:
    if body.get("stream"):
        raise ApiError("derender does not support streaming", param="stream")


def _generated(server: VllmStandIn, response: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[int]]]:
    found: list[tuple[dict[str, Any], list[int]]] = []
    for choice in response.get("choices") or []:
        if not choice.get("token_ids"):
            raise ApiError(f"choice {choice.get('index')} has empty or null token_ids")
        found.append((choice, asking.checked_ids(server, choice["token_ids"], "token_ids")))
    return found


def _with_text(logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not logprobs or not logprobs.get("content"):
        return None
    ids = [entry["token_id"] for entry in logprobs["content"]]
    return answering.chat_logprobs(ids, [entry["logprob"] for entry in logprobs["content"]], 1)


def _derendered(
    server: VllmStandIn,
    body: Mapping[str, Any],
    responses: list[dict[str, Any]],
    kind: str,
    choices: list[dict[str, Any]],
    prompt: int,
) -> dict[str, Any]:
    made = sum(len(choice["token_ids"]) for response in responses for choice in response["choices"])
    return {
        "id": responses[0].get("request_id"),
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or server.model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made},
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


disabled_routes = [
    web.post(route.path, disabled_scale_out) for route in scale_out_routes if isinstance(route, web.RouteDef)
]
"""What is there instead of `scale_out_routes` without `--enable-scale-out`."""
