"""vLLM's token-in, token-out routes: render messages to ids, generate from ids, derender ids to a message.

vLLM 0.26, vllm/entrypoints/scale_out: render, token_in_token_out, derender; /detokenize from vllm/entrypoints/serve.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.models.base import GIVEN_UP, ContextExceeded, ModelError, ModelReply
from agent_runtime.models.chat_parts import first_choice
from agent_runtime.models.http_client import CallOptions, JsonClient, StreamBroken
from agent_runtime.models.providers.openai_endpoint import parse_completion
from agent_runtime.models.refusals import final_refusal
from agent_runtime.models.vllm.prefix import end_of_turn, find_seam, have_same_text
from agent_runtime.models.vllm.weight_versions import extended, reported_spans
from rollout_api.records import Message, PolicySpan

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"
RENDER_PROMPT = "/v1/completions/render"
DERENDER_PROMPT = "/v1/completions/derender"
GENERATE = "/inference/v1/generate"
UNFINISHED = GIVEN_UP | {""}
"""Finish reasons of an answer that has not ended, or that the server aborted."""
SEEDING_TOKENS = 8
"""Number of the prompt's last tokens that are decoded together with an answer; otherwise some tokenizers drop the first
space. Newer vLLM uses 5, older versions none.
"""
PROBE: Message = {"role": "user", "content": "Say ok."}
PROBE_TOKENS = 8
ANSWERS = ("ok", "no")
"""Two answers without a common token, for any tokenizer."""


@dataclass
class Progress:
    """The received part of one answer. If a server fails, any server of the model can continue it."""

    prompt_ids: list[int] | None = None
    """The whole prompt; None until known."""
    ids: list[int] = field(default_factory=list)
    """The sampled ids so far."""
    logprobs: list[float] = field(default_factory=list)
    """One for each sampled id."""
    policy_spans: list[PolicySpan] = field(default_factory=list)
    """Policy version of each id, if known: the server reports versions at the end of its output."""
    finish_reason: str | None = None
    """Why sampling has ended; such an answer is never continued."""
    has_grammar: bool = False
    """Whether the tokens follow a grammar. Another request would restart the grammar, so it cannot continue these
    tokens.
    """

    @property
    def can_continue(self) -> bool:
        """Whether another request can continue from its tokens, or sampling has already ended."""
        return not self.has_grammar or self.finish_reason is not None

    def keep(self, tokens: int) -> None:
        """Keep only the first tokens; drop everything that describes the whole answer."""
        if len(self.ids) > tokens:
            del self.ids[tokens:], self.logprobs[tokens:]
            self.policy_spans, self.finish_reason = [], None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended; unknown values are empty."""

    finish_reason: str = ""
    cached_tokens: int = 0
    weight_versions: Any = None
    """As reported by vLLM; see `weight_versions.py`."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that stay constant while a server runs. None: not reported by the server."""

    max_model_len: int | None
    """Limit of tokens of prompt and answer together."""
    end_of_turn: int | None
    """Token that closes an answer."""
    end_text: str
    """Text of that token."""


class TokenRoutes:
    """The routes of one server. All methods raise ModelError, and ContextExceeded if the conversation is too long."""

    def __init__(self, client: JsonClient, name: str) -> None:
        self._client, self._name = client, name
        self._facts: ModelFacts | None = None
        self._learning = asyncio.Lock()

    async def render(self, body: Mapping[str, Any], options: CallOptions) -> dict[str, Any]:
        """Convert a chat request into vLLM's request to generate: `token_ids`, `sampling_params` and more."""
        asked = {**body, "logprobs": True, "top_logprobs": 0, "stream": False}
        return self._checked(RENDER, await self._fitting(RENDER, asked, options))

    async def render_prompt(self, body: Mapping[str, Any], options: CallOptions) -> dict[str, Any]:
        """Convert a completion request into vLLM's request to generate, like `render`."""
        asked = {**body, "logprobs": 0, "stream": False}
        rendered = await self._fitting(RENDER_PROMPT, asked, options)
        if not isinstance(rendered, list) or len(rendered) != 1:
            raise self._bad(RENDER_PROMPT, "body", "a list of one request", rendered)
        return self._checked(RENDER_PROMPT, rendered[0])

    async def prompt_after(
        self, stored: Sequence[int], rendered: Sequence[int], stops: Sequence[str], options: CallOptions
    ) -> list[int]:
        """Return the stored ids and what the rendering adds to them, or only the rendering if their texts differ.

        `stops` are stop strings, which an answer has only in its ids. If only the rendering is returned, a new token
        branch is recorded, because it does not begin with the stored ids.
        """
        facts = await self.facts(options)
        seam = None if facts.end_of_turn is None else find_seam(stored, rendered, facts.end_of_turn)
        if seam is None:
            return list(rendered)
        if seam.end > seam.start:
            ours = await self.text(stored[seam.start :], options)
            theirs = await self.text(rendered[seam.start : seam.end], options)
            if not have_same_text(ours, theirs, stops, facts.end_text):
                return list(rendered)
        return [*stored, *rendered[seam.end :]]

    async def generate(
        self, rendered: Mapping[str, Any], progress: Progress, options: CallOptions, *, on_tokens: Callable[[int], None]
    ) -> Ending:
        """Generate from `progress`, whose prompt is known, and add what arrives; `on_tokens` gets the number of new
        ids.

        Raises StreamBroken if the answer stops before its end.
        """
        prompt = progress.prompt_ids or []
        if progress.finish_reason is not None:
            return Ending(progress.finish_reason)
        limit = await self._limit(rendered, prompt, options)
        if limit is not None and limit <= len(progress.ids):
            return Ending("length")
        sampling = {**rendered["sampling_params"], "logprobs": 0}
        if limit is not None:
            sampling["max_tokens"] = limit - len(progress.ids)
        if sampling.get("min_tokens"):
            sampling["min_tokens"] = max(0, sampling["min_tokens"] - len(progress.ids))
        body = {
            # vLLM refuses a second request with the same id.
            **{key: value for key, value in rendered.items() if value is not None and key != "request_id"},
            "token_ids": [*prompt, *progress.ids],
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ending, before = Ending(), len(progress.ids)
        async with self._client.stream(GENERATE, body, options) as events:
            async for event in events:
                ids, logprobs, said = self._chunk(event)
                ending = Ending(said.finish_reason or ending.finish_reason, said.cached_tokens or ending.cached_tokens)
                if ids:
                    progress.ids += ids
                    progress.logprobs += logprobs
                    on_tokens(len(ids))
                if said.weight_versions:
                    progress.policy_spans = self._spans(progress, before, said.weight_versions)
                if ending.finish_reason not in UNFINISHED:
                    progress.finish_reason = ending.finish_reason
        if progress.finish_reason is None:
            raise StreamBroken(
                f"{self._client.base_url} aborted an answer (finish reason {ending.finish_reason or None})"
            )
        return ending

    async def derender(
        self, chat: Mapping[str, Any], prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        """Return the message of sampled ids, as vLLM's own parsers read it, without ids."""
        body = {
            "model": self._name,
            "generate_response": _generated(ids, finish),
            "prompt_tokens": len(prompt),
            # The whole prompt: a reasoning parser searches it for the token that begins the reasoning (vLLM 0.32,
            # vllm/reasoning/basic_parsers.py: is_reasoning_end).
            "prompt_token_ids": list(prompt),
            "chat_request": {**chat, "stream": False},
        }
        return parse_completion(await self._post(DERENDER, body, options))

    async def derender_prompt(
        self, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> str:
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
        payload = await self._post("/detokenize", {"model": self._name, "tokens": list(ids)}, options)
        text = payload.get("prompt")
        if not isinstance(text, str):
            raise self._bad("/detokenize", "prompt", "text", payload)
        return text

    async def encode(self, text: str, options: CallOptions) -> list[int]:
        body = {"model": self._name, "prompt": text, "add_special_tokens": False}
        ids = (await self._post("/tokenize", body, options)).get("tokens")
        if not isinstance(ids, list):
            raise self._bad("/tokenize", "tokens", "a list of token ids", ids)
        return ids

    async def facts(self, options: CallOptions) -> ModelFacts:
        async with self._learning:
            if self._facts is None:
                first, second = [await self._closed(answer, options) for answer in ANSWERS]
                end = end_of_turn(first, second)
                end_text = "" if end is None else await self.text([end], options)
                self._facts = ModelFacts(await self._max_model_len(options), end, end_text)
            return self._facts

    async def trial(self, options: CallOptions) -> str | None:
        """Check that the routes exist and are compatible. Return None, or the problem."""
        body = {"model": self._name, "messages": [PROBE], "max_tokens": PROBE_TOKENS}
        progress = Progress()
        try:
            rendered = await self.render(body, options)
            progress.prompt_ids = list(rendered["token_ids"])
            ending = await self.generate(rendered, progress, options, on_tokens=lambda count: None)
            await self.derender(body, progress.prompt_ids, progress.ids, ending.finish_reason, options)
            facts = await self.facts(options)
            await self.text(progress.ids, options)
            closed = await self._closed(ANSWERS[0], options)
            whole = await self._rendered([PROBE, {"role": "assistant", "content": ANSWERS[0]}, PROBE], options)
        except (ModelError, ContextExceeded) as error:
            return str(error)
        if facts.end_of_turn is None:
            return "its chat template closes an answer without a token"
        return None if whole[: len(closed)] == closed else "its chat template rewrites earlier messages in later turns"

    async def _closed(self, answer: str, options: CallOptions) -> list[int]:
        messages = [PROBE, {"role": "assistant", "content": answer}]
        return await self._rendered(messages, options, add_generation_prompt=False)

    async def _rendered(self, messages: Sequence[Message], options: CallOptions, **fields: Any) -> list[int]:
        rendered = await self.render({"model": self._name, "messages": messages, **fields}, options)
        return list(rendered["token_ids"])

    async def _limit(self, rendered: Mapping[str, Any], prompt: Sequence[int], options: CallOptions) -> int | None:
        """Return the most tokens of the answer."""
        asked = rendered["sampling_params"].get("max_tokens")
        longest = (await self.facts(options)).max_model_len
        if longest is None:
            return asked if isinstance(asked, int) else None
        if len(prompt) >= longest:
            raise ContextExceeded(f"the prompt has {len(prompt)} tokens, but the model's context is {longest} tokens")
        return min(asked, longest - len(prompt)) if isinstance(asked, int) else longest - len(prompt)

    async def _max_model_len(self, options: CallOptions) -> int | None:
        answer = await self._client.call("GET", "/v1/models", None, CallOptions(options.seconds, options.tries))
        entries = answer.payload.get("data") if isinstance(answer.payload, Mapping) else None
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping) and entry.get("id") == self._name:
                length = entry.get("max_model_len")
                return length if isinstance(length, int) else None
        return None

    async def _fitting(self, path: str, asked: dict[str, Any], options: CallOptions) -> Any:
        try:
            return await self._send(path, asked, options)
        except ContextExceeded:
            # Retry without the answer's limit: the prompt may fit, and the context limits the answer.
            if asked.get("max_tokens") is None:
                raise
            return await self._send(path, {**asked, "max_tokens": None}, options)

    def _checked(self, path: str, rendered: Any) -> dict[str, Any]:
        if not isinstance(rendered, dict) or not isinstance(rendered.get("sampling_params"), dict):
            raise self._bad(path, "sampling_params", "an object", rendered)
        ids = rendered.get("token_ids")
        if not isinstance(ids, list) or {*map(type, ids)} != {int}:
            raise self._bad(path, "token_ids", "a list of whole numbers", rendered)
        return rendered

    async def _post(self, path: str, body: Mapping[str, Any], options: CallOptions) -> dict[str, Any]:
        payload = await self._send(path, body, options)
        if not isinstance(payload, dict):
            where = f"{self._client.base_url}{path}"
            raise ModelError("BadResponse", f"{where}: expected a JSON object, got {str(payload)[:200]!r}")
        return payload

    async def _send(self, path: str, body: Mapping[str, Any], options: CallOptions) -> Any:
        answer = await self._client.call("POST", path, body, options)
        if answer.status != 200:
            raise final_refusal(f"{self._client.base_url}{path}", answer.status, answer.error)
        return answer.payload

    def _chunk(self, event: Any) -> tuple[list[int], list[float], Ending]:
        """Return new ids, their logprobs, and the other fields of the event."""
        try:
            usage = event.get("usage") or {}
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            if (choice := first_choice(event)) is None:
                return [], [], Ending(cached_tokens=cached)
            ids = [int(token) for token in choice.get("token_ids") or []]
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [float(entry["logprob"]) for entry in content]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise self._bad(GENERATE, "choices", "token ids and logprobs of one choice", event) from None
        if len(logprobs) != len(ids):
            raise ModelError(
                "NoLogprobs",
                f"{self._client.base_url}{GENERATE} gave {len(ids)} token ids with {len(logprobs)} logprobs; a token "
                "without logprob cannot be used for training. Check that logprobs are enabled in this server.",
            )
        return ids, logprobs, Ending(choice.get("finish_reason") or "", cached, choice.get("weight_versions"))

    def _spans(self, progress: Progress, before: int, said: Any) -> list[PolicySpan]:
        """Return the spans of all tokens so far. In this stream the server has sent all except the first `before`."""
        try:
            spans = reported_spans(said, len(progress.ids) - before)
        except ValueError as error:
            raise ModelError("BadResponse", f"{self._client.base_url}{GENERATE}: weight_versions: {error}") from None
        return extended(progress.policy_spans, before, spans)

    def _bad(self, path: str, what: str, expected: str, got: Any) -> ModelError:
        return ModelError(
            "BadResponse", f"{self._client.base_url}{path}: {what}: expected {expected}, got {str(got)[:200]}"
        )


def _generated(ids: Sequence[int], finish: str) -> dict[str, Any]:
    return {"request_id": "derender", "choices": [{"index": 0, "token_ids": list(ids), "finish_reason": finish}]}
