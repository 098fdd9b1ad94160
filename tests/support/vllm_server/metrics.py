"""GET /metrics in Prometheus' text form, with vLLM's names.

vLLM 0.26, vllm/v1/metrics/loggers.py: PrometheusStatLogger.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from tests.support.vllm_server.prefix_cache import BLOCK

if TYPE_CHECKING:
    from tests.support.vllm_server.engine import Engine

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0)
FINISHED = ("stop", "length", "abort")


def exposition(engine: Engine, model_name: str) -> str:
    """Return the whole page."""
    labels = f'engine="0",model_name="{model_name}"'
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, value: float) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"))

    def gauge(name: str, text: str, value: float) -> None:
        metric(f"vllm:{name}", "gauge", text, value)

    def counter(name: str, text: str, value: float) -> None:
        metric(f"vllm:{name}_total", "counter", text, value)

    running_now, waiting_now, blocks_now = engine.reported
    gauge("num_requests_running", "Number of requests in model execution batches.", running_now)
    gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting_now)
    gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", min(blocks_now / engine.kv_blocks, 1.0))
    gauge("engine_sleep_state", "Engine sleep state; 1 is asleep.", float(bool(engine.asleep)))
    counter("prefix_cache_queries", "Prefix cache queries, in queried tokens.", engine.cache.queries)
    counter("prefix_cache_hits", "Prefix cache hits, in cached tokens.", engine.cache.hits)
    counter("prompt_tokens", "Number of prefill tokens processed.", engine.prompt_tokens)
    counter("generation_tokens", "Number of generation tokens processed.", engine.generation_tokens)
    counter("num_preemptions", "Cumulative number of preemptions.", 0)
    lines.append("# TYPE vllm:request_success_total counter")
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{why}"}} {float(engine.ended.get(why, 0))}'
        for why in FINISHED
    ]
    lines.append("# TYPE vllm:iteration_tokens_total histogram")
    lines.append(f"vllm:iteration_tokens_total_sum{{{labels}}} {float(engine.generation_tokens)}")
    lines.append(f"vllm:iteration_tokens_total_count{{{labels}}} {float(engine.steps)}")
    lines += engine.first_tokens.lines("vllm:time_to_first_token_seconds", labels)
    adapters = ",".join(sorted(engine.weights.adapters))
    running = ",".join(sorted({request.adapter for request in engine.running if request.adapter}))
    lines.append("# TYPE vllm:lora_requests_info gauge")
    lines.append(
        f'vllm:lora_requests_info{{max_lora="8",running_lora_adapters="{running}",loaded_lora_adapters="{adapters}"}} 1.0'
    )
    lines.append("# TYPE vllm:cache_config_info gauge")
    lines.append(f'vllm:cache_config_info{{engine="0",block_size="{BLOCK}",num_gpu_blocks="{engine.kv_blocks}"}} 1.0')
    return "\n".join([*lines, ""])


class Histogram:
    """Counts of seconds by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(FIRST_TOKEN_BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one more value."""
        self.counts[bisect_left(FIRST_TOKEN_BUCKETS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, labels: str) -> list[str]:
        """Return its lines in Prometheus' format."""
        lines = [f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip([*map(str, FIRST_TOKEN_BUCKETS), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}')
        return [*lines, f"{name}_sum{{{labels}}} {self.sum}", f"{name}_count{{{labels}}} {float(total)}"]
