"""Further request fields that vLLM's token routes support. Pure.

vLLM 0.26, vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py: `to_sampling_params`, and
what rendering reads. vLLM silently ignores unknown fields, so they are refused here.
"""

from collections.abc import Mapping
from typing import Any

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
_ONLY_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (True, 0),
    "n": (1,),
    "return_token_ids": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
"""Fields that are accepted only with these values, which are vLLM's fixed behaviour."""


def without_effect(extra: Mapping[str, Any], *, prompt: bool) -> list[str]:
    """Return the fields that would have no effect. `prompt`: the request is not a chat."""
    taken = _PROMPT if prompt else _CHAT
    return [
        name
        for name, value in extra.items()
        if value is not None and name not in taken and value not in _ONLY_DEFAULTS.get(name, ())
    ]
