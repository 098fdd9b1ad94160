"""The routes of an engine that runners and the operator may call. All others get 404.

Routes of vLLM 0.26: vllm/entrypoints/openai, vllm/entrypoints/serve/{render,disagg,tokenize,lora,instrumentator,dev}.
New routes of later versions are not allowed until they are reviewed.
"""

from typing import Final

Route = tuple[str, str]
"""Method and path, compared without decoding, so that no encoded path can match another one."""

READ_ONLY: Final[frozenset[Route]] = frozenset(
    {("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/models")}
)

DATA: Final[frozenset[Route]] = READ_ONLY | {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/chat/completions/derender"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/completions/derender"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
}
"""Routes for runners, whose requests do not affect each other."""
SAMPLING: Final[frozenset[Route]] = frozenset(
    {("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/inference/v1/generate")}
)
"""Routes whose answers depend on the policy."""

CONTROL: Final[frozenset[Route]] = READ_ONLY | {
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/abort_requests"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/update_weight_version"),
    ("GET", "/weight_info"),
    ("POST", "/weight_checker"),
    ("GET", "/get_world_size"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/collective_rpc"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
"""Routes for the operator, which may change an engine."""
CHANGES: Final[frozenset[Route]] = frozenset(
    {
        ("POST", "/pause"),
        ("POST", "/start_weight_update"),
        ("POST", "/update_weights"),
        ("POST", "/finish_weight_update"),
        ("POST", "/update_weight_version"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/collective_rpc"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    }
)
"""Routes after which the gateway refuses calls until the operator has verified the engine's policy and health."""
FETCH_POLICY: Final[Route] = ("POST", "/policy/fetch")
SERVED_POLICY: Final[Route] = ("GET", "/policy/served")
SERVE_POLICY: Final[Route] = ("POST", "/policy/served")
DIGEST_POLICY: Final[Route] = ("POST", "/policy/digest")
CALL_HOOK: Final[Route] = ("POST", "/policy/hook")
OWN: Final[frozenset[Route]] = frozenset({FETCH_POLICY, SERVED_POLICY, SERVE_POLICY, DIGEST_POLICY, CALL_HOOK})
"""The gateway's own routes, on the control port."""
