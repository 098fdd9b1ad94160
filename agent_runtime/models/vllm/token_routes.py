"""vLLM's token-in, token-out routes.

vLLM 0.26, vllm/entrypoints/scale_out: render, token_in_token_out, derender; /detokenize from vllm/entrypoints/serve.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.models.base import ContextExceeded, ModelReply
from agent_runtime.models.chat_parts import first_choice
from agent_runtime.models.http_client import CallOptions
from agent_runtime.models.providers.openai_endpoint import parse_completion
from agent_runtime.models.routed_experts import ExpertRows, parse_npy
from agent_runtime.models.token_exact.answer_text import Stops
from agent_runtime.models.token_exact.routes import Chunk, Progress, Rendered, TokenRoutes
from agent_runtime.models.vllm.supported_fields import without_effect

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"
RENDER_PROMPT = "/v1/completions/render"
DERENDER_PROMPT = "/v1/completions/derender"
SEEDING_TOKENS = 8
"""Number of the prompt's last tokens that are decoded together with an answer; otherwise some tokenizers drop the first
space. Newer vLLM uses 5, older versions none.
"""


class VllmRoutes(TokenRoutes):
    """The routes of one vLLM."""

    SERVER = "vLLM"
    GENERATE = "/inference/v1/generate"

    async def render(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        """See `TokenRoutes`."""
        asked = {**body, "logprobs": True, "top_logprobs": 0, "stream": False}
        return self._checked(RENDER, await self._fitting(RENDER, asked, options))

    async def render_prompt(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        """See `TokenRoutes`."""
        asked = {**body, "logprobs": 0, "stream": False}
        rendered = await self._fitting(RENDER_PROMPT, asked, options)
        if not isinstance(rendered, list) or len(rendered) != 1:
            raise self._bad(RENDER_PROMPT, "body", "a list of one request", rendered)
        return self._checked(RENDER_PROMPT, rendered[0])

    async def derender(
        self, chat: Mapping[str, Any], prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        """See `TokenRoutes`."""
        body = {
            "model": self._name,
            # With the whole prompt: it may have opened the reasoning, and a parser reads it only here (vLLM 0.32,
            # vllm/renderers/online_derenderer.py: _derender_chat).
            "generate_response": {**_generated(ids, finish), "prompt_token_ids": list(prompt)},
            "prompt_tokens": len(prompt),
            "prompt_token_ids": prompt[-SEEDING_TOKENS:],
            "chat_request": {**chat, "stream": False, "skip_special_tokens": False},
        }
        return parse_completion(await self._post(DERENDER, body, options))

    async def derender_prompt(
        self, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> str:
        """See `TokenRoutes`."""
        body = {
            "model": self._name,
            "generate_responses": [_generated(ids, finish)],
            "prompt_tokens": [len(prompt)],
            "prompt_token_ids": [prompt[-SEEDING_TOKENS:]],
        }
        payload = await self._post(DERENDER_PROMPT, body, options)
        choices = payload.get("choices")
        text = (
            choices[0].get("text") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
        )
        if not isinstance(text, str):
            raise self._bad(DERENDER_PROMPT, "choices[0].text", "text", payload)
        return text

    async def text(self, ids: Sequence[int], options: CallOptions) -> str:
        """See `TokenRoutes`."""
        payload = await self._post("/detokenize", {"model": self._name, "tokens": list(ids)}, options)
        text = payload.get("prompt")
        if not isinstance(text, str):
            raise self._bad("/detokenize", "prompt", "text", payload)
        return text

    async def encode(self, text: str, options: CallOptions) -> list[int]:
        """See `TokenRoutes`."""
        body = {"model": self._name, "prompt": text, "add_special_tokens": False}
        ids = (await self._post("/tokenize", body, options)).get("tokens")
        if not isinstance(ids, list):
            raise self._bad("/tokenize", "tokens", "a list of token ids", ids)
        return ids

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """See `TokenRoutes`."""
        return without_effect(fields, prompt=prompt)

    def _generation(
        self, rendered: Rendered, ids: Sequence[int], limit: int | None, least: int, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        sampling = {**rendered.request["sampling_params"], "logprobs": 0}
        if limit is not None:
            sampling["max_tokens"] = limit
        if sampling.get("min_tokens"):
            sampling["min_tokens"] = least
        return {
            **rendered.request,
            **fields,
            "model": self._name,  # the answer to the render request may name another one, of an adapter
            "token_ids": list(ids),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _asking_experts(self, body: Mapping[str, Any], first: int) -> dict[str, Any]:
        return {**body, "sampling_params": {**body["sampling_params"], "routed_experts_prompt_start": first}}

    def _chunk(self, event: Any, progress: Progress, before: int) -> Chunk:
        usage = event.get("usage") or {}
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if (choice := first_choice(event)) is None:
            return Chunk(cached_tokens=cached)
        ids = list(choice.get("token_ids") or [])
        content = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        return Chunk(
            ids,
            logprobs,
            choice.get("finish_reason") or "",
            cached,
            choice.get("weight_versions"),
            choice.get("routed_experts"),
        )

    def _rows(self, reported: Any, tokens: int) -> ExpertRows:
        return parse_npy(reported)

    async def _max_model_len(self, options: CallOptions) -> int | None:
        # Only the entry of the base model has the length; `self._name` may be one of its adapters.
        lengths = {entry.get("id"): entry.get("max_model_len") for entry in await self._models(options)}
        own = lengths.get(self._name)
        return next((length for length in (own, *lengths.values()) if isinstance(length, int)), None)

    async def _fitting(self, path: str, asked: dict[str, Any], options: CallOptions) -> Any:
        try:
            return await self._send(path, asked, options)
        except ContextExceeded:
            # Retry without the answer's limit: the prompt may fit, and the context limits the answer.
            if asked.get("max_tokens") is None:
                raise
            return await self._send(path, {**asked, "max_tokens": None}, options)

    def _checked(self, path: str, rendered: Any) -> Rendered:
        if not isinstance(rendered, dict) or not isinstance(rendered.get("sampling_params"), dict):
            raise self._bad(path, "sampling_params", "an object", rendered)
        ids = rendered.get("token_ids")
        if not isinstance(ids, list) or {*map(type, ids)} != {int}:
            raise self._bad(path, "token_ids", "a list of whole numbers", rendered)
        sampling = rendered["sampling_params"]
        asked = sampling.get("max_tokens")
        return Rendered(
            ids=ids,
            # vLLM refuses a second request with the same id.
            request={key: value for key, value in rendered.items() if value is not None and key != "request_id"},
            stops=Stops.of(sampling),
            max_tokens=asked if isinstance(asked, int) else None,
            min_tokens=sampling.get("min_tokens") or 0,
            has_grammar=bool(sampling.get("structured_outputs")),
            has_media=bool(rendered.get("features")),
            model=rendered.get("model") or "",
        )


def _generated(ids: Sequence[int], finish: str) -> dict[str, Any]:
    return {"request_id": "derender", "choices": [{"index": 0, "token_ids": list(ids), "finish_reason": finish}]}
