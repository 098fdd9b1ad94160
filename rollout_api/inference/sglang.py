"""SGLang 0.5.23. File and line are of its wheel, below `sglang/srt`."""

from collections.abc import Mapping
from typing import Any, Final

from rollout_api.inference.description import (
    LORA_SECONDS,
    Adapters,
    Answer,
    Description,
    EngineType,
    Metrics,
    Release,
    Request,
    Routes,
    Updates,
    posts,
    read_only,
)

OLDEST: Final[Release] = (0, 5, 23)
"""Oldest version whose routes were read and run."""

RETRACT: Final = {"mode": "retract"}
"""Requests in progress go back to the queue, and their context is computed again with the new weights
(managers/scheduler.py:5817). The step in progress is finished first, so no token gets the wrong version. After `in_place`
that step's tokens are sent at the resume, under the new version; after `abort` the requests are lost.
"""


def _is_paused(answer: Answer) -> bool | None:
    # /ready answers 503 while the server is paused, starts or ends (managers/tokenizer_manager.py:732). The kubelet and
    # the gateway detect starts and ends by themselves, so 503 means paused here.
    return answer.status != 200


def _weights_name(answer: Answer) -> str | None:
    found = answer.body["weight_version"]
    return None if found is None else str(found)


def _reload(path: str, seconds: float) -> Request:
    # The cache has values of the old weights. Flushing it needs requests that are retracted, not paused in place
    # (managers/scheduler.py:5518).
    body = {"model_path": path, "flush_cache": True, "abort_all_requests": False}
    return Request("POST", "/update_weights_from_disk", body, seconds=seconds)


def _load_adapter(name: str, path: str) -> Request:
    return Request("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path}, seconds=LORA_SECONDS)


def _choose_adapter(body: dict[str, Any], name: str | None) -> None:
    # In chat completions, `model` may name an adapter too, after a colon (entrypoints/openai/serving_base.py:62).
    body.pop("model", None)
    body.pop("lora_path", None)
    if name is not None:
        body["lora_path"] = name


def _checksums(answer: Mapping[str, Any]) -> Any:
    ranks = answer.get("ranks")
    return ranks if isinstance(ranks, list) and ranks else None


_READ_ONLY = read_only("/health", "/metrics", "/model_info", "/v1/models")
_SAMPLING = posts("/v1/chat/completions", "/v1/completions", "/generate")
_CHANGES = posts(
    *("/pause_generation", "/update_weights_from_disk", "/update_weight_version"),
    *("/release_memory_occupation", "/resume_memory_occupation"),
)

SGLANG: Final = Description(
    type=EngineType.SGLANG,
    oldest=OLDEST,
    supports_updates=OLDEST,
    # arg_groups/fields/*.py
    fields_of_flags={
        "model.name": ("--model-path", "--model", "--served-model-name"),
        "model.uri": ("--download-dir", "--tokenizer-path"),
        "model.revision": ("--revision",),
        "parallelism.tensor": ("--tp-size", "--tensor-parallel-size", "--tp"),
        "parallelism.pipeline": ("--pp-size", "--pipeline-parallel-size", "--pp"),
        "parallelism.data": ("--dp-size", "--data-parallel-size", "--dp"),
        "parallelism.nodes": ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"),
        "sleep": ("--enable-memory-saver",),
        "lora": ("--enable-lora", "--max-lora-rank", "--max-loras-per-batch"),
        "toolCallParser": ("--tool-call-parser",),
    },
    operators_flags=(
        *("--host", "--port", "--api-key", "--admin-api-key", "--ssl-keyfile", "--ssl-certfile", "--fastapi-root-path"),
        *(
            "--config",
            "--weight-version",
            "--enable-metrics",
            "--enable-cache-report",
            "--incremental-streaming-output",
        ),
        *("--enable-priority-scheduling", "--schedule-low-priority-values-first", "--disable-priority-preemption"),
        *("--default-priority-value", "--grpc-mode", "--smg-grpc-mode", "--skip-tokenizer-init"),
    ),
    unsupported={
        "weightTransfer.mode Push": "receives tensors by other requests than vLLM, which are not implemented here; "
        "use mode Pull",
        "asleep true": "does not survive a repeated request to sleep or to wake up, and does not report which it did last",
    },
    # observability/metrics_collector.py. With priorities, a gauge has a line for each and one for all (priority="").
    metrics=Metrics(
        "sglang:",
        kv_cache_usage="token_usage",
        waiting="num_queue_reqs",
        # generation_tokens_total counts a request at its end, this one each step (metrics_collector.py:1032).
        progress=("realtime_tokens_total",),
        totals='priority=""',
    ),
    # entrypoints/http_server.py:1300-1850
    updates=Updates(
        paused=Request("GET", "/ready", also=(503,)),
        is_paused=_is_paused,
        weights=Request("GET", "/model_info"),
        weights_name=_weights_name,
        pause=Request("POST", "/pause_generation", RETRACT),
        resume=Request("POST", "/continue_generation", {}),
        abort=Request("POST", "/abort_request", {"abort_all": True}),
        # By default it would abort all requests (managers/io_struct.py:2155).
        name_weights=lambda name: Request(
            "POST", "/update_weight_version", {"new_version": name, "abort_all_requests": False}
        ),
        reload=_reload,
        checksums=Request("POST", "/weights_checker", {"action": "checksum"}),
        read_checksums=_checksums,
        # entrypoints/http_server.py:1650-1695
        adapters=Adapters(
            load=_load_adapter,
            unload=lambda name: Request("POST", "/unload_lora_adapter", {"lora_name": name}),
            choose=_choose_adapter,
        ),
        # After a failed load it reads the same files again "to roll back", and ends with their error
        # (model_executor/model_runner_components/weight_updater.py:232).
        survives_bad_weights=False,
    ),
    routes=Routes(
        data=_READ_ONLY | _SAMPLING | posts("/tokenize", "/detokenize", "/parse_function_call", "/separate_reasoning"),
        sampling=_SAMPLING,
        control=_READ_ONLY
        | _CHANGES
        | read_only("/ready")
        | posts("/continue_generation", "/abort_request", "/weights_checker", "/flush_cache"),
        changes=_CHANGES,
    ),
)
