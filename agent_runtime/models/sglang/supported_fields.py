"""Further request fields that SGLang's token routes support. Pure.

SGLang 0.5.23, sglang/api/v1/api_types.py (`SamplingParams`) and srt/entrypoints/openai/protocol.py
(`ChatCompletionRequest.to_sampling_params`, `TokenizeRequest`). Chat completions silently ignore unknown fields, so they
are refused here. A `tool_choice` that forces a call needs a grammar that only the server's chat route makes.
"""

import json
from collections.abc import Mapping
from typing import Any

from agent_runtime.models.token_exact.supported_fields import ONLY_DEFAULTS, fields_without_effect

SAMPLING: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("custom_params", "ebnf", "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "no_stop_trim"),
            *("presence_penalty", "regex", "repetition_penalty", "stop", "stop_regex", "stop_token_ids", "temperature"),
            *("top_k", "top_p"),
        )
    },
    "seed": "sampling_seed",
}
"""Fields of a chat request, and their names in `sampling_params`."""
TEMPLATE = frozenset({"chat_template_kwargs", "reasoning_effort", "tool_choice"})
"""Fields that change the prompt."""
_LIMITS = frozenset({"max_tokens", "min_tokens"})
_PROMPT = SAMPLING.keys() | _LIMITS | {"cache_salt", "extra_key", "priority", "response_format", "user"}
_CHAT = _PROMPT | TEMPLATE | {"max_completion_tokens", "parallel_tool_calls"}


def without_effect(extra: Mapping[str, Any], *, prompt: bool) -> list[str]:
    """Return the fields that would have no effect. `prompt`: the request is not a chat."""
    forced = {"tool_choice": () if prompt else ("auto", "none")}
    taken = (_PROMPT if prompt else _CHAT) - {"tool_choice"}
    return fields_without_effect(extra, taken, {**ONLY_DEFAULTS, **forced})


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Fields of `sampling_params` that make the tokens follow a grammar."""


def sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's `sampling_params` of a request in OpenAI's format, without the limits. See `to_sampling_params`."""
    found = {own: body[name] for name, own in SAMPLING.items() if body.get(name) is not None}
    form = body.get("response_format") or {}
    match form.get("type"):
        case "json_schema":
            found["json_schema"] = json.dumps((form.get("json_schema") or {}).get("schema") or {})
        case "json_object":
            found["json_schema"] = '{"type": "object"}'
        case "structural_tag":
            found["structural_tag"] = json.dumps(form)
    return found
