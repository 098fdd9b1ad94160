"""How the container of each inference server is started. Only flags that the declared version supports are used."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rollout_api.cluster import MODEL_ENGINE_PORT
from rollout_api.inference.description import EngineType
from rollout_api.inference.vllm_versions import HAS_QUIET_ENDPOINTS, HAS_SHUTDOWN_TIMEOUT, NEEDS_SCALE_OUT
from rollout_api.model_server import ModelServerSpec

DRAIN_SECONDS: Final = 45
"""Time for running requests after a pod is asked to stop; KServe's value for vLLM (kserve pull request 5496)."""
RENDEZVOUS_PORT: Final = 5000
"""Port of the first node at which the nodes of one SGLang meet; its documentation's example."""


@dataclass(frozen=True)
class Launch:
    """The container of one inference server."""

    command: tuple[str, ...]
    arguments: Callable[[ModelServerSpec, str, bool], list[str]]
    """Arguments for a spec and the folder of the model. The last parameter: a further pod of a multi-node server."""
    environment: Callable[[ModelServerSpec], dict[str, str]]
    drains: Callable[[ModelServerSpec], bool]
    """Whether the server finishes running requests before it ends."""


def _option(flag: str, value: str | int) -> tuple[str, str]:
    return flag, str(value)


# vLLM


def _vllm_drains(spec: ModelServerSpec) -> bool:
    return spec.engine.release >= HAS_SHUTDOWN_TIMEOUT


def _vllm_arguments(spec: ModelServerSpec, model_path: str, worker: bool) -> list[str]:
    return [
        model_path,
        *_option("--served-model-name", spec.model.name),
        # The gateway in the same pod controls access; no other client reaches it.
        *_option("--host", "127.0.0.1"),
        *_option("--port", MODEL_ENGINE_PORT),
        *_vllm_parallelism(spec, worker=worker),
        # Each turn's prompt begins with the previous turn's.
        "--enable-prefix-caching",
        # Makes responses report how many tokens of their prompt were cached.
        "--enable-prompt-tokens-details",
        # Makes vLLM accept requests with a priority.
        *_option("--scheduling-policy", "priority"),
        *(_option("--shutdown-timeout", DRAIN_SECONDS) if _vllm_drains(spec) else ()),
        *(
            _option("--disable-access-log-for-endpoints", "/health,/metrics")
            if spec.engine.release >= HAS_QUIET_ENDPOINTS
            else ()
        ),
        *(("--enable-scale-out",) if spec.engine.release >= NEEDS_SCALE_OUT else ()),
        *(("--enable-sleep-mode",) if spec.sleep else ()),
        *_vllm_lora(spec),
        *(
            ("--enable-auto-tool-choice", *_option("--tool-call-parser", spec.tool_call_parser))
            if spec.tool_call_parser
            else ()
        ),
        *_vllm_weight_transfer(spec),
        *spec.extra_args,
    ]


def _vllm_parallelism(spec: ModelServerSpec, *, worker: bool) -> list[str]:
    parallelism = spec.parallelism
    found = [
        *_option("--tensor-parallel-size", parallelism.tensor),
        *_option("--pipeline-parallel-size", parallelism.pipeline),
        *_option("--data-parallel-size", parallelism.data),
    ]
    if parallelism.data > 1 and not worker:
        # By default vLLM starts one API server for each copy of the model, and loads a LoRA adapter only in one of them.
        found += _option("--api-server-count", 1)
    if parallelism.nodes > 1:
        # LeaderWorkerSet sets these two variables (its documentation, "environment variables").
        found += [
            *_option("--nnodes", parallelism.nodes),
            *_option("--node-rank", "$(LWS_WORKER_INDEX)"),
            *_option("--master-addr", "$(LWS_LEADER_ADDRESS)"),
            *(("--headless",) if worker else ()),
        ]
    return found


def _vllm_lora(spec: ModelServerSpec) -> tuple[str, ...]:
    if spec.lora is None:
        return ()
    ranks = _option("--max-lora-rank", spec.lora.max_rank)
    return "--enable-lora", *ranks, *_option("--max-loras", spec.lora.max_adapters)


def _vllm_weight_transfer(spec: ModelServerSpec) -> tuple[str, ...]:
    if spec.weight_transfer.push is None:
        return ()
    return _option("--weight-transfer-config", json.dumps({"backend": spec.weight_transfer.push.backend}))


def _vllm_environment(spec: ModelServerSpec) -> dict[str, str]:
    return {
        # /pause, /resume, /weight_info and similar routes exist only in this mode (vLLM docs, RLHF).
        "VLLM_SERVER_DEV_MODE": "1",
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if spec.lora is not None else {}),
        # The weights are downloaded already. An engine that asks a hub could load other ones.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Makes prefix hashes equal in all processes of an engine (vLLM docs, prefix caching).
        "PYTHONHASHSEED": "0",
    }


# SGLang 0.5.23: srt/arg_groups/fields/*.py


def _sglang_arguments(spec: ModelServerSpec, model_path: str, worker: bool) -> list[str]:
    parallelism = spec.parallelism
    return [
        *_option("--model-path", model_path),
        *_option("--served-model-name", spec.model.name),
        *_option("--host", "127.0.0.1"),
        *_option("--port", MODEL_ENGINE_PORT),
        *_option("--tp-size", parallelism.tensor),
        *_option("--pp-size", parallelism.pipeline),
        *_option("--dp-size", parallelism.data),
        *(_sglang_nodes(spec) if parallelism.nodes > 1 else ()),
        "--enable-metrics",
        # Makes chat completions report how many tokens of their prompt were cached.
        "--enable-cache-report",
        # Without it every event of a stream repeats the whole answer so far.
        "--incremental-streaming-output",
        # Priorities order the queue, as in vLLM; running requests are not preempted for them.
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        "--disable-priority-preemption",
        *_option("--default-priority-value", 0),
        *(("--enable-memory-saver",) if spec.sleep else ()),
        *_sglang_lora(spec),
        *(_option("--tool-call-parser", spec.tool_call_parser) if spec.tool_call_parser else ()),
        *spec.extra_args,
    ]


def _sglang_nodes(spec: ModelServerSpec) -> list[str]:
    return [
        *_option("--nnodes", spec.parallelism.nodes),
        *_option("--node-rank", "$(LWS_WORKER_INDEX)"),
        *_option("--dist-init-addr", f"$(LWS_LEADER_ADDRESS):{RENDEZVOUS_PORT}"),
    ]


def _sglang_lora(spec: ModelServerSpec) -> tuple[str, ...]:
    if spec.lora is None:
        return ()
    # Without adapters at the start, SGLang needs to know which layers they may change.
    ranks = (*_option("--max-lora-rank", spec.lora.max_rank), *_option("--lora-target-modules", "all"))
    # Calls without an adapter count as one (arg_groups/fields/lora.py:66).
    return "--enable-lora", *ranks, *_option("--max-loras-per-batch", spec.lora.max_adapters + 1)


def _sglang_environment(spec: ModelServerSpec) -> dict[str, str]:
    return {
        # By default /health samples a token, and fails while the server is paused (entrypoints/http_server.py:721).
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
    }


LAUNCHES: Final[Mapping[EngineType, Launch]] = {
    EngineType.VLLM: Launch(("vllm", "serve"), _vllm_arguments, _vllm_environment, _vllm_drains),
    EngineType.SGLANG: Launch(
        ("python3", "-m", "sglang.launch_server"),
        _sglang_arguments,
        _sglang_environment,
        # On SIGTERM it waits for them (managers/tokenizer_manager.py:3508).
        lambda spec: True,
    ),
}
