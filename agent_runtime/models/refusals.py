"""Interprets a server's error body: the conversation is too long, the server refuses it, or something else. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelConfigError, ModelError, RequestRefused

# 500 because older llama.cpp servers refuse a long prompt with it.
REFUSAL_STATUSES = frozenset({400, 413, 422, 500})

CONTEXT_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "string_above_max_length"})
CONTEXT_WORDING = re.compile(
    r"maximum context length"  # OpenAI, vLLM, OpenRouter, Mistral
    r"|longer than the (maximum model length|model's context length)"  # vLLM, SGLang
    r"|model's context length is only"  # vLLM
    r"|cannot be greater than max_model_len"  # vLLM, of max_tokens alone
    r"|exceeds? the (available |model's )?(maximum )?context (size|length|window)"  # llama.cpp, SGLang, LM Studio
    r"|prompt is too long"  # Anthropic, vLLM
    r"|exceed context limit"  # Anthropic
    r"|tokens \+ `?max_new_tokens`? must be <="  # text-generation-inference
    r"|input token count.*exceeds the maximum"  # Gemini
    r"|reduce the length of the (messages|input prompt|prompt)",
    re.IGNORECASE,
)
NO_TOOL_PARSER = re.compile(r"--enable-auto-tool-choice|--tool-call-parser", re.IGNORECASE)  # vLLM
SCALE_OUT_OFF = re.compile(r"--enable-scale-out", re.IGNORECASE)  # vLLM 0.32, entrypoints/scale_out/factories.py
TEXT_ALONE = re.compile(
    r"is not a multimodal model|at most 0 (image|audio|video)"  # vLLM
    r"|(image|multimodal)[^.]*not supported|(not|n't) support[^.]*(image|multimodal)",  # SGLang, llama.cpp, OpenAI
    re.IGNORECASE,
)
FILTER_CODES = frozenset({"content_filter", "content_policy_violation", "responsibleaipolicyviolation"})


def error_text(payload: Any) -> tuple[set[str], str]:
    """Return the codes and the message of an error body, in the formats of OpenAI, vLLM, FastAPI and Anthropic."""
    if not isinstance(payload, Mapping):
        return set(), str(payload or "")
    inner = payload.get("error", payload)
    if not isinstance(inner, Mapping):
        return set(), str(inner)
    codes = {str(inner[field]).lower() for field in ("code", "type") if inner.get(field)}
    nested = inner.get("innererror")
    if isinstance(nested, Mapping) and nested.get("code"):
        codes.add(str(nested["code"]).lower())
    return codes, str(inner.get("message") or inner.get("detail") or dict(inner))


STATUSES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("invalid_api_key", "authentication_error", "permission_error"), 401),
    **dict.fromkeys(("model_not_found", "not_found_error"), 404),
    **dict.fromkeys(("rate_limit_exceeded", "rate_limit_error"), 429),
    **dict.fromkeys(("overloaded_error", "api_error", "server_error"), 503),
}
"""Statuses that the codes and types of errors of OpenAI and Anthropic usually come with."""


def is_error(payload: Any) -> bool:
    """Whether a response with a status of success, or an event of a stream, is an error: gateways answer so when the
    server behind them fails.
    """
    return isinstance(payload, Mapping) and bool(payload.get("error"))


def status_of_error(payload: Mapping[str, Any], other: int) -> int:
    """Return the status that such an error would have: of its words or its code (vLLM and OpenRouter send a status as
    code), or else `other`.
    """
    if refusal(400, payload) is not None:
        return 400
    codes = error_text(payload)[0]
    numbers = (int(code) for code in codes if code.isdecimal() and len(code) == 3 and code >= "400")
    known = (STATUSES[code] for code in codes if code in STATUSES)
    return next(numbers, None) or next(known, other)


def refusal(status: int, payload: Any) -> ContextExceeded | ContentFiltered | None:
    """Return the refusal that the policy caused, or None."""
    if status not in REFUSAL_STATUSES:
        return None
    codes, message = error_text(payload)
    if codes & FILTER_CODES:
        return ContentFiltered(message)
    if status == 413 or codes & CONTEXT_CODES or CONTEXT_WORDING.search(message):
        return ContextExceeded(message)
    return None


def final_refusal(where: str, status: int, error: str) -> ModelError:
    """Return the error for a final status that concerns neither a key nor a path."""
    if (unfit := config_refusal(where, error)) is not None:
        return unfit
    message = f"{where} answers {status}: {error}"
    if status in (400, 422):  # 422 is FastAPI's answer to an invalid body
        return RequestRefused("BadRequest", message)
    # Other statuses (payment required, failed dependency, no content) are not caused by the request.
    return ModelError("UnexpectedStatus", message)


def config_refusal(where: str, error: str) -> ModelConfigError | None:
    """Return the refusal that no retry changes, because job and server are incompatible, or None.

    `error` is the server's own message for a status of 4xx.
    """
    if NO_TOOL_PARSER.search(error):
        return ModelConfigError(
            "NoToolParser",
            f"{where} cannot read tool calls: {error}; start vLLM with --enable-auto-tool-choice and "
            "--tool-call-parser "
            "(toolCallParser of a ModelServer), or give the agent no tools",
        )
    if TEXT_ALONE.search(error):
        return ModelConfigError(
            "TextModel",
            f"{where} accepts only text, but a message has other content: {error}; use a model that supports it, or an "
            "agent that sends text",
        )
    return None


def disabled_route(where: str, error: str) -> ModelConfigError | None:
    """Return the error for a 403 of vLLM that concerns no key: its token routes are off. None for others."""
    if SCALE_OUT_OFF.search(error):
        return ModelConfigError("NoTokenRoutes", f"{where} is disabled; start vLLM with --enable-scale-out")
    return None
