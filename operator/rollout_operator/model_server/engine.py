"""How vLLM is started: its command line and its environment. Every flag is one that the declared version knows."""

import json
from typing import Any, Final

from rollout_api.cluster import MODEL_ENGINE_PORT
from rollout_api.model_server import ModelServerSpec, PullForm, TransferMode

DRAIN_SECONDS: Final = 45
"""Requests that run when a pod ends may go on for so long; KServe's choice for vLLM (kserve pull request 5496)."""

HAS_SHUTDOWN_TIMEOUT: Final = (0, 18)
"""First vLLM with `--shutdown-timeout` (vLLM pull request 34730); older ones abort what runs."""
HAS_QUIET_ENDPOINTS: Final = (0, 16)
"""First vLLM with `--disable-access-log-for-endpoints`."""

NEEDS_SCALE_OUT: Final = (0, 30)
"""First vLLM that offers render, derender and generate only with `--enable-scale-out` (vLLM pull request 54579)."""

SCRATCH: Final = "/scratch"
"""Home of the engine: its compiled kernels live as long as the pod, so a restart of the container is quick."""

Json = dict[str, Any]


def drains(spec: ModelServerSpec) -> bool:
    """Whether this engine finishes what runs before it ends."""
    return spec.engine.release >= HAS_SHUTDOWN_TIMEOUT


def arguments(spec: ModelServerSpec, model_path: str, *, worker: bool = False) -> list[str]:
    """Arguments of `vllm serve`.

    Args:
        spec: of the ModelServer.
        model_path: folder with the weights.
        worker: of a further pod of a server that spans several nodes; it has no address of its own.
    """
    return [
        model_path,
        *_option("--served-model-name", spec.model.name),
        # The gateway beside it decides who may ask for what; nobody else reaches it.
        *_option("--host", "127.0.0.1"),
        *_option("--port", MODEL_ENGINE_PORT),
        *_parallelism(spec, worker=worker),
        # A turn's prompt is the one before and a little more.
        "--enable-prefix-caching",
        # Without it a request that names a priority is an error.
        *_option("--scheduling-policy", "priority"),
        *(_option("--shutdown-timeout", DRAIN_SECONDS) if drains(spec) else ()),
        *(
            _option("--disable-access-log-for-endpoints", "/health,/metrics")
            if spec.engine.release >= HAS_QUIET_ENDPOINTS
            else ()
        ),
        *(("--enable-scale-out",) if spec.engine.release >= NEEDS_SCALE_OUT else ()),
        *(("--enable-sleep-mode",) if spec.sleep else ()),
        *(_lora(spec) if spec.lora else ()),
        *(
            ("--enable-auto-tool-choice", *_option("--tool-call-parser", spec.tool_call_parser))
            if spec.tool_call_parser
            else ()
        ),
        *(_weight_transfer(spec)),
        *spec.extra_args,
    ]


def environment(spec: ModelServerSpec) -> list[Json]:
    """Environment of the engine, the user's own last."""
    pull = spec.weight_transfer.mode is TransferMode.PULL
    adapters = pull and spec.weight_transfer.pull.form is PullForm.ADAPTER
    fixed = {
        # /pause, /resume, /weight_info and their like exist in this mode alone (vLLM docs, RLHF).
        "VLLM_SERVER_DEV_MODE": "1",
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {}),
        # The weights are there: an engine that asks a hub could come up with others.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Hashes of prefixes are the same in all processes of an engine (vLLM docs, prefix caching).
        "PYTHONHASHSEED": "0",
        "HOME": SCRATCH,
        # Software asks for the user's name, and a user by number has none.
        "USER": "rollout",
        "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/torchinductor",
    }
    own = {variable.name: variable.value for variable in spec.env}
    return [{"name": name, "value": value} for name, value in {**fixed, **own}.items()]


def _option(flag: str, value: str | int) -> tuple[str, str]:
    return flag, str(value)


def _parallelism(spec: ModelServerSpec, *, worker: bool) -> list[str]:
    ways = spec.parallelism
    found = [
        *_option("--tensor-parallel-size", ways.tensor),
        *_option("--pipeline-parallel-size", ways.pipeline),
        *_option("--data-parallel-size", ways.data),
    ]
    if ways.nodes > 1:
        # The two variables come from LeaderWorkerSet (its documentation, "environment variables").
        found += [
            *_option("--nnodes", ways.nodes),
            *_option("--node-rank", "$(LWS_WORKER_INDEX)"),
            *_option("--master-addr", "$(LWS_LEADER_ADDRESS)"),
            *(("--headless",) if worker else ()),
        ]
    return found


def _lora(spec: ModelServerSpec) -> list[str]:
    assert spec.lora is not None
    return [
        "--enable-lora",
        *_option("--max-lora-rank", spec.lora.max_rank),
        *_option("--max-loras", spec.lora.max_adapters),
    ]


def _weight_transfer(spec: ModelServerSpec) -> tuple[str, ...]:
    if spec.weight_transfer.push is None:
        return ()
    return _option("--weight-transfer-config", json.dumps({"backend": spec.weight_transfer.push.backend}))
