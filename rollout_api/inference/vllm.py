"""vLLM (0.26: vllm/entrypoints/openai, vllm/entrypoints/serve/{render,disagg,tokenize,lora,instrumentator,dev})."""

from collections.abc import Mapping
from typing import Any, Final

from rollout_api.inference.description import (
    LORA_SECONDS,
    Adapters,
    Answer,
    Description,
    EngineType,
    Metrics,
    Request,
    Routes,
    Sleep,
    Transfer,
    Updates,
    posts,
    read_only,
)
from rollout_api.inference.vllm_versions import OLDEST, SUPPORTS_UPDATES


def _is_paused(answer: Answer) -> bool | None:
    found = answer.body.get("is_paused")
    return found if isinstance(found, bool) else None


def _weights_name(answer: Answer) -> str | None:
    # A version that does not support updates has no such route, and the model's own weights.
    found = None if answer.status == 404 else answer.body["weight_version"]
    return None if found is None else str(found)


def _load_adapter(name: str, path: str) -> Request:
    body = {"lora_name": name, "lora_path": path}
    return Request("POST", "/v1/load_lora_adapter", body, seconds=LORA_SECONDS)


def _choose_adapter(body: dict[str, Any], name: str | None) -> None:
    body["model"] = name  # without a name, vLLM uses its model
    if name is None:
        del body["model"]


def _reload(path: str, seconds: float) -> Request:
    # The path is always sent, because without it vLLM loads its last folder.
    body = {"method": "reload_weights", "kwargs": {"weights_path": path}, "timeout": seconds}
    return Request("POST", "/collective_rpc", body, seconds=seconds)


def _checksums(answer: Mapping[str, Any]) -> Any:
    found = answer.get("checksums")
    return found if isinstance(found, dict) else None


_READ_ONLY = read_only("/health", "/metrics", "/version", "/v1/models")
_SAMPLING = posts("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
_CHANGES = posts(
    *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)

VLLM: Final = Description(
    type=EngineType.VLLM,
    oldest=OLDEST,
    supports_updates=SUPPORTS_UPDATES,
    fields_of_flags={
        "model.name": ("--model", "--served-model-name"),
        "model.uri": ("--download-dir", "--tokenizer"),
        "model.revision": ("--revision", "--tokenizer-revision", "--code-revision"),
        "parallelism.tensor": ("--tensor-parallel-size", "-tp"),
        "parallelism.pipeline": ("--pipeline-parallel-size", "-pp"),
        "parallelism.data": ("--data-parallel-size", "-dp"),
        "parallelism.nodes": ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
        "sleep": ("--enable-sleep-mode",),
        "lora": ("--enable-lora", "--max-lora-rank", "--max-loras"),
        "toolCallParser": ("--tool-call-parser", "--enable-auto-tool-choice"),
        "weightTransfer": ("--weight-transfer-config",),
    },
    operators_flags=(
        *("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile", "--root-path"),
        *("--config", "--scheduling-policy", "--shutdown-timeout", "--api-server-count"),
    ),
    unsupported={},
    # vllm/v1/metrics/loggers.py
    metrics=Metrics(
        "vllm:",
        kv_cache_usage="kv_cache_usage_perc",
        waiting="num_requests_waiting",
        progress=("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count"),
    ),
    # vllm/entrypoints/serve/dev/rlhf/api_router.py and .../rpc/api_router.py
    updates=Updates(
        paused=Request("GET", "/is_paused"),
        is_paused=_is_paused,
        weights=Request("GET", "/weight_info", also=(404,)),
        weights_name=_weights_name,
        # The prefix cache is kept. vLLM would clear it by default and compute the whole context of each request again
        # (vllm/v1/engine/core.py, `_finish_pause`). Runners salt their requests with the policy version, so a version
        # never uses cache entries of another one.
        pause=Request("POST", "/pause", query={"mode": "keep", "clear_cache": "false"}),
        resume=Request("POST", "/resume"),
        abort=Request("POST", "/abort_requests", {}),
        name_weights=lambda name: Request("POST", "/update_weight_version", {"new_version": name}),
        reload=_reload,
        checksums=Request("POST", "/weight_checker", {"action": "checksum"}),
        read_checksums=_checksums,
        adapters=Adapters(
            load=_load_adapter,
            unload=lambda name: Request("POST", "/v1/unload_lora_adapter", {"lora_name": name}),
            choose=_choose_adapter,
        ),
        transfer=Transfer(
            init=lambda info: Request("POST", "/init_weight_transfer_engine", {"init_info": info}),
            # Without it, a worker keeps its part of every group that it was in, and NCCL may refuse the next one (vLLM pull
            # request 40646).
            leave=Request("POST", "/shutdown_weight_transfer_engine", also=(404, 405)),
            start=Request("POST", "/start_weight_update"),
            update=lambda info: Request("POST", "/update_weights", {"update_info": info}),
            cancel=Request("POST", "/finish_weight_update", {}),
            finish=lambda name: Request("POST", "/finish_weight_update", {"weight_version": name}),
        ),
        # Requests go on as soon as all is awake (vllm/v1/engine/core.py, `wake_up`), so new weights are loaded before the
        # rest. `/is_sleeping` cannot tell a paused engine from a sleeping one.
        sleep=Sleep(
            sleep=Request("POST", "/sleep", query={"level": "1", "mode": "keep"}),
            wake=Request("POST", "/wake_up", query={"tags": "weights"}),
            resume=Request("POST", "/wake_up", query={"tags": "kv_cache"}),
        ),
    ),
    routes=Routes(
        data=_READ_ONLY
        | _SAMPLING
        | posts(
            *("/v1/chat/completions/render", "/v1/chat/completions/derender"),
            *("/v1/completions/render", "/v1/completions/derender", "/tokenize", "/detokenize"),
        ),
        sampling=_SAMPLING,
        control=_READ_ONLY
        | _CHANGES
        | read_only("/is_paused", "/weight_info", "/get_world_size", "/is_sleeping")
        | posts(
            *("/resume", "/abort_requests", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
            *("/weight_checker", "/reset_prefix_cache"),
        ),
        changes=_CHANGES,
    ),
)
