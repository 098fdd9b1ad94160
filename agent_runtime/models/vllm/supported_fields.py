"""Further request fields that vLLM's token routes support. Pure.

vLLM 0.26, vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py: `to_sampling_params`, and
what rendering reads. vLLM silently ignores unknown fields, so they are refused here.
"""

from collections.abc import Mapping
from typing import Any

from agent_runtime.models.token_exact.supported_fields import fields_without_effect

_PROMPT = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
        "seed",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "user",
        "vllm_xargs",
    }
)
_CHAT = _PROMPT | {
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "include_reasoning",
    "max_completion_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "parallel_tool_calls",
    "reasoning_effort",
    "tool_choice",
}


def without_effect(extra: Mapping[str, Any], *, prompt: bool) -> list[str]:
    """Return the fields that would have no effect. `prompt`: the request is not a chat."""
    return fields_without_effect(extra, _PROMPT if prompt else _CHAT)
