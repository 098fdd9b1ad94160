"""Routes for trainers and operators: pause, weights, sleep, adapters; and health and metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast, get_args

from aiohttp import web

from tests.support.vllm_server import errors
from tests.support.vllm_server.context import server_of
from tests.support.vllm_server.engine import PauseMode
from tests.support.vllm_server.errors import ApiError, json_object
from tests.support.vllm_server.metrics import exposition
from tests.support.vllm_server.weights import LoadError

if TYPE_CHECKING:
    from tests.support.vllm_server.server import VllmStandIn

routes = web.RouteTableDef()
weight_checker_routes = web.RouteTableDef()

WORKERS = 1


@routes.get("/health")
async def health(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/instrumentator/health.py: health. It does not tell whether tokens are sampled."""
    return web.Response()


@routes.get("/version")
async def version(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/instrumentator/basic.py: show_version."""
    return web.json_response({"version": server_of(http).engine_version})


@routes.get("/metrics")
async def metrics(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/instrumentator/metrics.py."""
    server = server_of(http)
    return web.Response(text=exposition(server.engine, server.model))


@routes.post("/pause")
async def pause(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: pause_generation; ?mode=abort|wait|keep, clear_cache."""
    clear = http.query.get("clear_cache", "true").lower() in ("true", "1")
    await server_of(http).engine.pause(pause_mode(http), clear_cache=clear)
    return web.json_response({"status": "paused"})


def pause_mode(http: web.Request) -> PauseMode:
    mode = http.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise ApiError(f"Input should be 'abort', 'wait' or 'keep', got {mode!r}", 400, "Bad Request", "mode")
    return cast("PauseMode", mode)


@routes.post("/resume")
async def resume(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: resume_generation; allowed also when nothing is paused."""
    server_of(http).engine.resume()
    return web.json_response({"status": "resumed"})


@routes.get("/is_paused")
async def is_paused(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: is_paused."""
    return web.json_response({"is_paused": paused(server_of(http))})


@routes.post("/abort_requests")
async def abort_requests(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: abort_requests; without ids, all requests."""
    body = await json_object(http)
    aborted = server_of(http).engine.abort(body.get("request_ids") or [])
    return web.json_response({"status": "aborted", "aborted": aborted})


@routes.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: init_weight_transfer_engine; {init_info}."""
    init_info = (await json_object(http)).get("init_info")
    if init_info is None:
        raise errors.bad_request("Missing 'init_info' in request body")
    try:
        await server_of(http).weights.join(init_info)
    except LoadError as error:
        raise errors.failed(str(error)) from None
    return web.json_response({"message": "Weight transfer initialized"})


@routes.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(http: web.Request) -> web.Response:
    """vLLM 0.32, vllm/entrypoints/rl/online/api_router.py: shutdown_weight_transfer_engine."""
    try:
        server_of(http).weights.leave()
    except LoadError as error:
        raise errors.failed(str(error)) from None
    return web.json_response({"message": "Weight transfer shut down"})


@routes.post("/start_weight_update")
async def start_weight_update(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: start_weight_update."""
    try:
        server_of(http).weights.start()
    except LoadError as error:
        raise errors.failed(str(error)) from None
    return web.json_response({"message": "Weight update started"})


@routes.post("/update_weights")
async def update_weights(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: update_weights; {update_info}, which is
    {names, dtype_names, shapes, …} of vllm/distributed/weight_transfer/nccl_engine.py, or what ipc_engine.py takes.
    """
    update = (await json_object(http)).get("update_info")
    if update is None:
        raise errors.bad_request("Missing 'update_info' in request body")
    try:
        await server_of(http).weights.receive(update)
    except LoadError as error:
        raise errors.failed(str(error)) from None
    return web.json_response({"message": "Weights updated"})


@routes.post("/finish_weight_update")
async def finish_weight_update(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: finish_weight_update; {weight_version} or no body."""
    body = await json_object(http) if http.can_read_body else {}
    try:
        server_of(http).weights.finish(body.get("weight_version"))
    except LoadError as error:
        raise errors.failed(str(error)) from None
    return web.json_response({"message": "Weight update finished"})


@routes.post("/update_weight_version")
async def update_weight_version(http: web.Request) -> web.Response:
    """vLLM since its pull request 49040, vllm/entrypoints/serve/dev/rlhf/api_router.py: update_weight_version;
    {new_version}. It changes only the label.
    """
    label = (await json_object(http)).get("new_version")
    if not isinstance(label, str):
        raise errors.bad_request("new_version: Input should be a valid string")
    server_of(http).weights.label = label
    return web.json_response({"success": True, "new_version": label})


@routes.get("/weight_info")
async def weight_info(http: web.Request) -> web.Response:
    """vLLM since its pull request 49040, vllm/entrypoints/serve/dev/rlhf/api_router.py: weight_info. Returns the label
    that was set, and `default` before.
    """
    server = server_of(http)
    claimed = server.faults.claim_version
    return web.json_response({"weight_version": server.weights.label if claimed is None else claimed})


@weight_checker_routes.post("/weight_checker")
async def weight_checker(http: web.Request) -> web.Response:
    """vLLM 0.32, vllm/entrypoints/rl/online/api_router.py: weight_checker; {action: checksum|reset|compare, baseline}.

    It reads the loaded weights, whatever the label is, and also answers while the engine is paused.
    """
    server = server_of(http)
    body = await json_object(http)
    action = body.get("action")
    if action not in ("checksum", "reset", "compare"):
        raise errors.bad_request(f"action must be one of checksum|reset|compare, got {action!r}")
    if action == "reset":
        server.weights.discard()
        return web.json_response({"status": "reset"})
    checksums = server.weights.checksums()
    if action == "checksum":
        return web.json_response({"checksums": checksums})
    baseline = body.get("baseline")
    if not isinstance(baseline, dict):
        raise errors.bad_request("action='compare' requires a 'baseline' object")
    different = sorted(name for name in {*baseline, *checksums} if baseline.get(name) != checksums.get(name))
    return web.json_response({"match": not different, "mismatches": different})


@routes.get("/get_world_size")
async def get_world_size(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rlhf/api_router.py: get_world_size."""
    return web.json_response({"world_size": WORKERS})


@routes.post("/collective_rpc")
async def collective_rpc(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/rpc/api_router.py: collective_rpc; {method, args, kwargs, timeout}.

    `reload_weights` with kwargs {weights_path} is vllm/v1/worker/gpu_worker.py: Worker.reload_weights. It changes no label.
    """
    server = server_of(http)
    body = await json_object(http)
    method = body.get("method")
    if method is None:
        raise errors.bad_request("Missing 'method' in request body")
    if method != "reload_weights":
        raise errors.failed(f"AttributeError: 'Worker' object has no attribute '{method}'")
    try:
        async with asyncio.timeout(body.get("timeout")):
            await server.weights.reload((body.get("kwargs") or {}).get("weights_path"))
    except LoadError as error:
        raise errors.failed(f"Call to collective_rpc method failed: {error}") from None
    except TimeoutError:
        raise errors.failed("RPC call to reload_weights timed out.") from None
    return web.json_response({"results": [None] * WORKERS})


@routes.post("/sleep")
async def sleep(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/sleep/api_router.py: sleep; ?level=1|2, ?mode. Level 2 discards the weights."""
    server = server_of(http)
    await server.engine.sleep(pause_mode(http))
    level = int(http.query.get("level", "1"))
    if level == 2:
        server.weights.discard()
    return web.json_response({"status": "sleeping", "level": level})


@routes.post("/wake_up")
async def wake_up(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/sleep/api_router.py: wake_up; ?tags=weights&tags=kv_cache, or all without
    tags.
    """
    engine, tags = server_of(http).engine, http.query.getall("tags", [])
    engine.wake_up(tags)
    return web.json_response({"status": "sleeping" if engine.asleep else "awake", "tags": tags or None})


@routes.get("/is_sleeping")
async def is_sleeping(http: web.Request) -> web.Response:
    """vLLM 0.32, vllm/v1/engine/core.py: is_sleeping; also true for an engine that is only paused."""
    return web.json_response({"is_sleeping": paused(server_of(http))})


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/dev/cache/api_router.py: reset_prefix_cache."""
    server_of(http).engine.cache.clear()
    return web.Response()


@routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/lora/api_router.py: load_lora_adapter; {lora_name, lora_path, load_inplace}."""
    weights = server_of(http).weights
    body = await json_object(http)
    name, path = body.get("lora_name"), body.get("lora_path")
    if not name or not path:
        raise ApiError("Both 'lora_name' and 'lora_path' must be provided.", 400, "InvalidUserInput")
    if name == server_of(http).model:
        # Since vLLM 0.31, vllm/entrypoints/openai/models/serving.py: _check_load_lora_adapter_request.
        raise ApiError(f"The lora adapter '{name}' conflicts with a served base model.", 400, "InvalidUserInput")
    if name in weights.adapters and not body.get("load_inplace"):
        raise ApiError(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            400,
            "InvalidUserInput",
        )
    try:
        await weights.add_adapter(name, path)
    except LoadError as error:
        if "No weights" in str(error):
            raise ApiError(f"Loading lora {name} failed: No adapter found for {path}", 404, "NotFoundError") from None
        raise errors.failed(str(error)) from None
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


@routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(http: web.Request) -> web.Response:
    """vLLM 0.26, vllm/entrypoints/serve/lora/api_router.py: unload_lora_adapter; {lora_name}."""
    weights = server_of(http).weights
    name: Any = (await json_object(http)).get("lora_name")
    if not name:
        raise ApiError("'lora_name' needs to be provided to unload a LoRA adapter.", 400, "InvalidUserInput")
    if weights.adapters.pop(name, None) is None:
        raise ApiError(f"The lora adapter '{name}' cannot be found.", 404, "NotFoundError")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def paused(server: VllmStandIn) -> bool:
    """vLLM counts a sleeping engine as paused."""
    return server.engine.paused is not None or bool(server.engine.asleep)
