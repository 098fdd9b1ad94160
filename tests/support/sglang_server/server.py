"""SGLang's routes. File and line are of SGLang 0.5.23, below `sglang/srt`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from aiohttp import web

from tests.support.vllm_server import answering, asking
from tests.support.vllm_server.context import SERVER
from tests.support.vllm_server.engine import Request
from tests.support.vllm_server.errors import ApiError, json_object
from tests.support.vllm_server.experts import ROW_BYTES, experts_by, int32
from tests.support.vllm_server.server import VllmStandIn
from tests.support.vllm_server.tokenizer import tokenizer
from tests.support.vllm_server.tool_parser import parse
from tests.support.vllm_server.weights import LoadError

routes = web.RouteTableDef()

SAMPLING_PARAMS = frozenset(
    (
        *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"),
        *(
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "min_new_tokens",
            "json_schema",
            "regex",
            "ebnf",
        ),
        *("structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
        *("stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice"),
    )
)
"""sglang/api/v1/api_types.py: SamplingParams, which rejects others."""
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
DEFAULT_NEW_TOKENS = 128


class SglangStandIn(VllmStandIn):
    """Answers as SGLang does. `incremental`: as with --incremental-streaming-output."""

    def __init__(self, *, incremental: bool = True, reasoning_parser: str | None = None, **settings: Any) -> None:
        super().__init__(weight_versions=True, **settings)
        self.incremental, self.reasoning_parser = incremental, reasoning_parser
        self.opens_reasoning = False
        """The template ends a prompt with <think>."""
        self.pause_mode: str | None = None
        self.listed_as = self.model

    def routes(self) -> Iterator[web.RouteTableDef]:
        """See VllmStandIn."""
        yield routes


def server_of(http: web.Request) -> SglangStandIn:
    """Return the stand-in that received a request."""
    server = http.app[SERVER]
    assert isinstance(server, SglangStandIn)
    return server


# -- health and facts


@routes.get("/health")
async def health(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:721, with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0."""
    return web.Response()


@routes.get("/ready")
async def ready(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:714."""
    return web.Response(status=503 if server_of(http).pause_mode else 200)


@routes.get("/model_info")
async def model_info(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:812."""
    server = server_of(http)
    return web.json_response(
        {
            "model_path": server.weights.path or "base",
            "served_model_name": server.listed_as,
            "is_generation": True,
            "weight_version": server.weights.label,
            "tool_call_parser": "hermes" if server.tool_parser else None,
            "reasoning_parser": server.reasoning_parser,
        }
    )


@routes.get("/v1/models")
async def models(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1993."""
    server = server_of(http)
    card = {"id": server.listed_as, "root": server.listed_as, "parent": None, "max_model_len": server.max_model_len}
    cards = [card, *(card | {"id": name, "parent": server.listed_as} for name in server.weights.adapters)]
    return web.json_response(
        {"object": "list", "data": [{**card, "object": "model", "owned_by": "sglang"} for card in cards]}
    )


@routes.get("/metrics")
async def metrics(http: web.Request) -> web.Response:
    """observability/metrics_collector.py: with priorities, a gauge has a line for each and one for all."""
    engine = server_of(http).engine
    running, waiting, blocks = engine.reported
    lines = []
    for name, value in (
        ("num_running_reqs", running),
        ("num_queue_reqs", waiting),
        ("token_usage", min(blocks / engine.kv_blocks, 1.0)),
    ):
        for priority in ("", "0"):
            lines.append(f'sglang:{name}{{model_name="policy",priority="{priority}",tp_rank="0"}} {float(value)}')
    for mode, value in (("prefill_compute", engine.prompt_tokens), ("decode", engine.generation_tokens)):
        lines.append(f'sglang:realtime_tokens_total{{mode="{mode}",model_name="policy",priority=""}} {float(value)}')
    return web.Response(text="\n".join([*lines, ""]))


# -- tokens


@routes.post("/tokenize")
async def tokenize(http: web.Request) -> web.Response:
    """entrypoints/openai/serving_tokenize.py:39."""
    server, body = server_of(http), await json_object(http)
    if ("prompt" in body) == ("messages" in body):
        raise ApiError("Exactly one of 'prompt' or 'messages' must be provided.")
    if "messages" in body:
        opened = tokenizer().encode("<think>\n") if server.opens_reasoning else []
        ids = [*asking.chat_ids(server, body), *(opened if body.get("add_generation_prompt", True) else [])]
    else:
        ids = tokenizer().encode(str(body["prompt"]))
    return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": server.max_model_len})


@routes.post("/detokenize")
async def detokenize(http: web.Request) -> web.Response:
    """entrypoints/openai/serving_tokenize.py:150."""
    body = await json_object(http)
    special = not body.get("skip_special_tokens", True)
    return web.json_response({"text": tokenizer().decode(body["tokens"], special=special)})


@routes.post("/parse_function_call")
async def parse_function_call(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1734, with the parser `hermes`, which drops white space around the text."""
    content, calls = parse((await json_object(http))["text"])
    found = [{"tool_index": 0, "name": call["name"], "parameters": call["arguments"]} for call in calls]
    return web.json_response({"normal_text": (content or "").strip() if calls else content or "", "calls": found})


@routes.post("/separate_reasoning")
async def separate_reasoning(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1774; parser/reasoning_parser.py:163."""
    text = (await json_object(http))["text"]
    thought, closed, rest = text.partition("</think>")
    if "<think>" not in text:
        return web.json_response({"reasoning_text": "", "text": text})
    return web.json_response({"reasoning_text": thought.replace("<think>", "").strip(), "text": rest if closed else ""})


@routes.post("/load_lora_adapter")
async def load_lora_adapter(http: web.Request) -> web.Response:
    """managers/tokenizer_control_mixin.py:659: every failure is a 400."""
    weights, body = server_of(http).weights, await json_object(http)
    name, error = str(body["lora_name"]), None
    if name in weights.adapters:
        error = f"LoRA adapter with name {name} already exists"
    else:
        try:
            await weights.add_adapter(name, str(body["lora_path"]))
        except LoadError as failure:
            error = str(failure)
    found = {"success": error is None, "error_message": error, "loaded_adapters": list(weights.adapters)}
    return web.json_response(found, status=200 if error is None else 400)


@routes.post("/unload_lora_adapter")
async def unload_lora_adapter(http: web.Request) -> web.Response:
    """managers/tokenizer_control_mixin.py."""
    weights, name = server_of(http).weights, str((await json_object(http))["lora_name"])
    found = weights.adapters.pop(name, None) is not None
    return web.json_response({"success": found}, status=200 if found else 400)


@routes.post("/generate")
async def generate(http: web.Request) -> web.StreamResponse:
    """entrypoints/http_server.py:928."""
    server, body = server_of(http), await json_object(http)
    sampling = body.get("sampling_params") or {}
    for name in sampling:
        if name not in SAMPLING_PARAMS:
            raise ApiError(f"unknown field `{name}`, expected one of {', '.join(sorted(SAMPLING_PARAMS))}")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ApiError("input_ids: expected a list of token ids")
    if len(ids) >= server.max_model_len:
        raise ApiError(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({server.max_model_len} tokens)."
        )
    request = _engine_request(server, http, body, sampling, ids)
    if body.get("stream"):
        return await answering.stream(server, http, request, _events(server, request, body))
    await answering.whole(server, http, request)
    return web.json_response(_output(server, request, body, 0, len(request.ids), request.finish))


def _engine_request(
    server: SglangStandIn, http: web.Request, body: Mapping[str, Any], sampling: Mapping[str, Any], ids: list[int]
) -> Request:
    as_vllm = {
        "temperature": sampling.get("temperature"),
        "seed": sampling.get("sampling_seed"),
        "ignore_eos": sampling.get("ignore_eos"),
        "min_tokens": sampling.get("min_new_tokens"),
        "stop": sampling.get("stop"),
        "stop_token_ids": sampling.get("stop_token_ids"),
        "include_stop_str_in_output": sampling.get("no_stop_trim"),
        "structured_outputs": any(sampling.get(name) for name in GRAMMARS),
    }
    most = server.max_model_len - len(ids)
    asked = sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    limit = most if asked is None else min(asked, most)
    adapter = body.get("lora_path")
    if adapter is not None and adapter not in server.weights.adapters:
        raise ApiError(f"Got LoRA adapter that has never been loaded: {adapter}")
    body = {**body, "model": adapter}  # other names are not checked
    return asking.engine_request(server, http, body, as_vllm, prefix="", ids=ids, max_tokens=limit)


async def _events(server: SglangStandIn, request: Request, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    async for start, end, finish in answering.pieces(request):
        yield answering.event(_output(server, request, body, start if server.incremental else 0, end, finish))


def _output(
    server: SglangStandIn, request: Request, body: Mapping[str, Any], start: int, end: int, finish: str | None
) -> dict[str, Any]:
    """managers/tokenizer_manager.py:2506."""
    reasons: dict[str | None, dict[str, Any]] = {
        "stop": {"type": "stop", "matched": tokenizer().eos if request.stopped_by is None else request.stopped_by},
        "length": {"type": "length", "length": end},
        "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
    }
    info: dict[str, Any] = {
        "id": request.id,
        "finish_reason": reasons.get(finish),
        "prompt_tokens": len(request.prompt),
        "weight_version": server.weights.label,
        "completion_tokens": end,
        "cached_tokens": request.cached_tokens,
    }
    if body.get("return_logprob") and not server.faults.no_logprobs:
        pairs = zip(request.logprobs[start:end], request.ids[start:end], strict=True)
        info["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if finish is not None:
        info["weight_versions"] = _versions(request, server.weights.label)
        if server.routed_experts and body.get("return_routed_experts"):
            rows = experts_by(server.weights.version, [*request.prompt, *request.ids[:-1]])
            info["routed_experts"] = int32(rows[int(body.get("routed_experts_start_len") or 0) * ROW_BYTES :])
    return {"text": tokenizer().decode(request.ids[start:end]), "output_ids": request.ids[start:end], "meta_info": info}


def _versions(request: Request, label: str) -> list[dict[str, Any]]:
    """utils/weight_versions.py:66: an answer without tokens has the present version."""
    spans = [{"version": name, "start": start, "end": end} for name, start, end in request.labels]
    return spans or [{"version": label, "start": 0, "end": 0}]


# -- OpenAI's API


@routes.post("/v1/chat/completions")
async def chat_completions(http: web.Request) -> web.StreamResponse:
    """entrypoints/openai/serving_chat.py:1275, :2960."""
    server, body = server_of(http), await json_object(http)
    with_ids = bool(body.get("return_token_ids"))
    if body.get("stream"):
        raise ApiError(
            "return_token_ids is not supported with streaming" if with_ids else "stream: not in this stand-in"
        )
    ids = asking.chat_ids(server, body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    names = ("temperature", "stop", "ignore_eos")
    sampling = {"max_new_tokens": limit, "sampling_seed": body.get("seed"), **{name: body.get(name) for name in names}}
    request = _engine_request(server, http, body, sampling, ids)
    await answering.whole(server, http, request)
    text = answering.text_of(request)
    content, calls = parse(text) if body.get("tools") and server.tool_parser else (text, [])
    made = [{"id": f"call_{number}", "type": "function", "function": call} for number, call in enumerate(calls)]
    message = {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": made or None}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": {"content": [{"token": "", "logprob": value} for value in request.logprobs]}
        if body.get("logprobs")
        else None,
        "finish_reason": "tool_calls" if calls and request.finish == "stop" else request.finish,
        "matched_stop": request.stopped_by,
    }
    if with_ids:
        choice |= {"prompt_token_ids": request.prompt_ids, "response_token_ids": request.ids}
    versions = _versions(request, server.weights.label)
    return web.json_response(
        {
            "id": request.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model"),
            "choices": [choice],
            "usage": answering.usage(request),
            "metadata": {"weight_version": versions[-1]["version"], "weight_versions": versions},
        }
    )


# -- control


@routes.post("/pause_generation")
async def pause_generation(http: web.Request) -> web.Response:
    """managers/tokenizer_manager.py:2267; managers/scheduler.py:5817."""
    server, mode = server_of(http), (await json_object(http)).get("mode", "abort")
    if mode not in ("abort", "retract", "in_place"):
        raise ApiError(f"mode: Input should be 'abort', 'retract' or 'in_place', got {mode!r}", 422)
    server.pause_mode = mode
    await server.engine.pause("abort" if mode == "abort" else "keep", clear_cache=False)
    return web.json_response({"message": "Generation paused successfully.", "status": "ok"})


@routes.post("/continue_generation")
async def continue_generation(http: web.Request) -> web.Response:
    """managers/tokenizer_manager.py:2282."""
    server = server_of(http)
    await json_object(http)
    server.pause_mode = None
    server.engine.resume()
    return web.json_response({"message": "Generation continued successfully.", "status": "ok"})


@routes.post("/update_weight_version")
async def update_weight_version(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1527."""
    server, body = server_of(http), await json_object(http)
    if body.get("abort_all_requests", True):
        server.engine.abort([])
    server.weights.label = str(body["new_version"])
    return web.json_response({"success": True, "message": "", "new_version": server.weights.label})


@routes.post("/update_weights_from_disk")
async def update_weights_from_disk(http: web.Request) -> web.Response:
    """managers/scheduler_components/weight_updater.py:137."""
    server, body = server_of(http), await json_object(http)
    path = str(body["model_path"])
    if body.get("abort_all_requests"):
        server.engine.abort([])
    try:
        await server.weights.reload(path)
    except LoadError as error:
        return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
    if (version := body.get("weight_version")) is not None:
        server.weights.label = str(version)
    if body.get("flush_cache", True):
        if server.pause_mode != "retract" and server.engine.running:
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running or queued."
            )
            return web.json_response({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        server.engine.cache.clear()
    server.listed_as = path
    message = "Succeeded to update model weights."
    return web.json_response({"success": True, "message": message, "num_paused_requests": 0})


@routes.post("/weights_checker")
async def weights_checker(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1599."""
    ranks = [{"checksums": server_of(http).weights.checksums(), "per_gpu_checksum": "", "parallelism_info": []}]
    return web.json_response({"success": True, "message": "Success.", "ranks": ranks})


@routes.post("/abort_request")
async def abort_request(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1721."""
    server, body = server_of(http), await json_object(http)
    if body.get("abort_all"):
        server.engine.abort([])
    return web.Response()


@routes.post("/flush_cache")
async def flush_cache(http: web.Request) -> web.Response:
    """entrypoints/http_server.py:1025."""
    server_of(http).engine.cache.clear()
    return web.Response(text="Cache flushed.\n")
