"""What each version of vLLM can do. `tests/integration/vllm/test_versions.py` compares it with vLLM's wheels."""

from typing import Final

from rollout_api.inference.description import Release

OLDEST: Final[Release] = (0, 14)
"""Oldest supported vLLM: the first version with documented `/pause` and `/is_paused`. The flags for several nodes are
older (vLLM pull request 23691).
"""
HAS_QUIET_ENDPOINTS: Final[Release] = (0, 16)
"""First vLLM with `--disable-access-log-for-endpoints`."""
HAS_SHUTDOWN_TIMEOUT: Final[Release] = (0, 18)
"""First vLLM with `--shutdown-timeout` (vLLM pull request 34730). Older versions abort running requests."""
SUPPORTS_UPDATES: Final[Release] = (0, 27)
"""First vLLM that can set and report the version of its weights: `/finish_weight_update` with `weight_version`,
`/weight_info` (vLLM pull request 49040).
"""
NEEDS_SCALE_OUT: Final[Release] = (0, 30)
"""First vLLM that offers render, derender and generate only with `--enable-scale-out` (vLLM pull request 54579)."""
REFUSES_MODEL_AS_ADAPTER: Final[Release] = (0, 31)
"""First vLLM that refuses a LoRA adapter with its base model's name. The gateway names adapters differently for every
version.
"""
CHECKS_WEIGHTS: Final[Release] = (0, 32)
"""First vLLM with `/weight_checker`. For older versions a server's weights are not compared with those of the others."""
REPORTS_TOKEN_VERSIONS: Final[Release] = (0, 32)
"""First vLLM that reports the version of each token (`weight_versions`). For older versions runners derive it from the
policy gate.
"""

MARKS: Final[dict[str, Release]] = {
    '"/weight_info"': SUPPORTS_UPDATES,
    '"/update_weight_version"': SUPPORTS_UPDATES,
    "weight_version: Annotated": SUPPORTS_UPDATES,
    "enable_scale_out": NEEDS_SCALE_OUT,
    "conflicts with a ": REFUSES_MODEL_AS_ADAPTER,
    "/weight_checker": CHECKS_WEIGHTS,
    "weight_versions": REPORTS_TOKEN_VERSIONS,
}
"""Texts in vLLM's Python files, and the release in which each appears first."""
