"""Checks the bodies of chat, completions and generate, and converts them to a request for the engine."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support.vllm_server import errors, model
from tests.support.vllm_server.engine import Request
from tests.support.vllm_server.errors import ApiError
from tests.support.vllm_server.template import TemplateError, render
from tests.support.vllm_server.tokenizer import tokenizer

if TYPE_CHECKING:
    from tests.support.vllm_server.server import VllmStandIn

# vLLM 0.26, vllm/entrypoints/openai/completion/protocol.py: CompletionRequest.max_tokens.
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True)
class Wanted:
    """The parts of an answer that a client requests."""

    stream: bool
    usage: bool
    """Whether a stream ends with a chunk that has the usage."""
    logprobs: int | None
    """Number of alternatives; None: no logprobs."""
    token_ids: bool


def adapter_of(server: VllmStandIn, name: Any) -> str | None:
    """Return the LoRA adapter that a model's name refers to; None for the base model. Raises ApiError."""
    if not name or name == server.model:
        return None
    if name in server.weights.adapters:
        return str(name)
    raise errors.not_served(name)


EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
"""vLLM 0.32, vllm/entrypoints/openai/chat_completion/protocol.py: ChatCompletionRequest.reasoning_effort."""


def chat_ids(server: VllmStandIn, body: Mapping[str, Any]) -> list[int]:
    """Return the rendered prompt of a chat request. Raises ApiError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: Field required", param="messages")
    if body.get("reasoning_effort") not in EFFORTS:
        raise ApiError(
            f"reasoning_effort: Input should be 'none', 'minimal', 'low', ..., got {body['reasoning_effort']!r}"
        )
    tools = body.get("tools") or []
    choice = body.get("tool_choice", "auto" if tools else "none")
    if tools and choice != "none" and not server.tool_parser:
        raise ApiError('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    continued = bool(body.get("continue_final_message"))
    generation = bool(body.get("add_generation_prompt", not continued))
    if continued and generation:
        raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    try:
        text = render(messages, tools, generation_prompt=generation, continue_final=continued)
    except TemplateError as error:
        kind = str(error)
        if kind in ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url"):
            raise ApiError(f"{server.model} is not a multimodal model") from None
        raise ApiError(kind) from None
    return tokenizer().encode(text)


def checked_ids(server: VllmStandIn, value: Any, name: str) -> list[int]:
    """Return a prompt's token ids. Raises ApiError."""
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ApiError(f"{name}: expected a list of at least one token id", param=name)
    if min(value) < 0 or (largest := max(value)) >= tokenizer().size:
        raise ApiError(f"Token id {min(value) if min(value) < 0 else largest} is out of vocabulary")
    if len(value) >= server.max_model_len:
        raise errors.prompt_too_long(server.max_model_len, len(value))
    return value


def limit(server: VllmStandIn, prompt: Sequence[int], asked: Any) -> int:
    """Return how many tokens the answer may have at most. Raises ApiError if prompt and answer are too long together."""
    if asked is None:
        if len(prompt) >= server.max_model_len:
            raise errors.too_long(server.max_model_len, len(prompt), 1)
        return server.max_model_len - len(prompt)
    most = at_least_one(asked)
    if most > server.max_model_len:
        raise ApiError(
            f"max_tokens={most} cannot be greater than max_model_len={server.max_model_len}. Please request fewer "
            "output tokens.",
            param="max_tokens",
        )
    if len(prompt) + most > server.max_model_len:
        raise errors.too_long(server.max_model_len, len(prompt), most)
    return most


def at_least_one(max_tokens: Any) -> int:
    """Return the limit of an answer's tokens. Raises ApiError."""
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    return max_tokens


def engine_request(
    server: VllmStandIn,
    http: web.Request,
    body: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    prefix: str,
    ids: list[int],
    max_tokens: int,
) -> Request:
    """Return the engine's request. Raises ApiError for what this server does not support, and for what it refuses on
    demand.
    """
    hit = server.faults.hits()
    if hit and server.faults.status is not None and len(ids) > server.faults.longer_than:
        raise errors.on_demand(server.faults.status, server.faults.retry_after)
    if (sampling.get("n") or 1) != 1:
        raise ApiError("n: the stand-in gives one answer to a request", param="n")
    priority = int(body.get("priority") or 0)
    if priority and not server.priority_scheduling:
        raise ApiError(f"Got priority {priority} but Priority scheduling is not enabled.")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ApiError("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    session = http.headers.get("X-Session-ID") or str(body.get("session_id") or "")
    external = http.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex
    stop = sampling.get("stop") or []
    # vLLM 0.26, vllm/v1/engine/input_processor.py.
    if max(sampling.get("allowed_token_ids") or [0]) >= tokenizer().size:
        raise ApiError("allowed_token_ids contains out-of-vocab token id!")
    return Request(
        id=f"{prefix}{external}",
        external_id=str(external),
        route=http.path,
        prompt=array("I", ids),
        session=session,
        max_tokens=max_tokens,
        min_tokens=int(sampling.get("min_tokens") or 0),
        # Greedy sampling has no use for a seed.
        seed=0 if sampling.get("temperature") == 0 else int(sampling.get("seed") or 0),
        ignore_eos=bool(sampling.get("ignore_eos")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(sampling.get("stop_token_ids") or ()),
        keeps_stop=bool(sampling.get("include_stop_str_in_output")),
        sampling=sampling,
        cache_salt=salt or "",
        priority=priority,
        adapter=adapter_of(server, body.get("model")),
        # vLLM 0.26, vllm/v1/core/sched/scheduler.py: a request's grammar reads its output alone, and so begins anew.
        script_ids=model.scripted_ids(
            server.script, ids, session, cut=server.faults.cut_tool_call, anew=bool(sampling.get("structured_outputs"))
        ),
        drop_after=server.faults.drop_after if hit else None,
    )


def structured_outputs(form: Any) -> dict[str, Any] | None:
    """vLLM 0.26, vllm/entrypoints/generate/base/protocol.py: structured_outputs_from_response_format. Raises ApiError."""
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "json_schema":
        return {"json": form["json_schema"]["schema"]}
    if kind == "json_object":
        return {"json_object": True}
    if kind in (None, "text"):
        return None
    raise ApiError(f"response_format: Input tag {kind!r} found does not match any of the expected tags", param="body")


def wanted(server: VllmStandIn, body: Mapping[str, Any], logprobs: int | None) -> Wanted:
    """Return the requested parts of the answer, without those that the current faults remove."""
    options = body.get("stream_options") or {}
    return Wanted(
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        logprobs=None if server.faults.no_logprobs else logprobs,
        token_ids=bool(body.get("return_token_ids")) and not server.faults.no_token_ids,
    )
