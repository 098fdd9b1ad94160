"""What may be asked of an engine, and by whom. All else is not there.

Routes of vLLM 0.26: vllm/entrypoints/openai, vllm/entrypoints/serve/{render,disagg,tokenize,lora,instrumentator,dev}. A
route that an engine gains with a new version is closed until somebody has looked at it.
"""

from typing import Final

Route = tuple[str, str]
"""Method and path, compared as they were sent: nothing is decoded, so nothing decodes to another path."""

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
"""For runners: what answers one request, and changes nothing for others."""
SAMPLING: Final[frozenset[Route]] = frozenset(
    {("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/inference/v1/generate")}
)
"""Those whose answers are a policy's; the others are the same with all of them."""

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
"""For the operator: what changes an engine."""
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
"""After these nobody knows which policy the engine serves, or whether it answers, until the operator has looked."""
FETCH_POLICY: Final[Route] = ("POST", "/policy/fetch")
SERVED_POLICY: Final[Route] = ("GET", "/policy/served")
SERVE_POLICY: Final[Route] = ("POST", "/policy/served")
DIGEST_POLICY: Final[Route] = ("POST", "/policy/digest")
CALL_HOOK: Final[Route] = ("POST", "/policy/hook")
OWN: Final[frozenset[Route]] = frozenset({FETCH_POLICY, SERVED_POLICY, SERVE_POLICY, DIGEST_POLICY, CALL_HOOK})
"""The gateway's own, on the control port."""
