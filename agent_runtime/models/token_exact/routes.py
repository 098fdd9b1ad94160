"""The interface of token-in, token-out routes: render messages to ids, generate from ids, read ids as a message.

`agent_runtime/models/vllm` and `agent_runtime/models/sglang` speak the routes of one inference server each. What does not
depend on the server is here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent_runtime.models.answers import check_tokens
from agent_runtime.models.base import RATE_LIMITED, ContextExceeded, ModelError, ModelReply, is_given_up
from agent_runtime.models.http_client import ANSWER_BYTES, EVENT_BYTES, CallOptions, JsonClient, StreamBroken
from agent_runtime.models.refusals import final_refusal
from agent_runtime.models.routed_experts import AnswerExperts, ExpertRows, located
from agent_runtime.models.token_exact.answer_text import Stops
from agent_runtime.models.token_exact.prefix import end_of_turn, find_seam, have_same_text
from agent_runtime.models.token_exact.weight_versions import extended, reported_spans
from rollout_api.model import RoutedExperts
from rollout_api.records import Message, PolicySpan

PROBE: Message = {"role": "user", "content": "Say ok."}
PROBE_TOKENS = 8
MOST_OVER_LIMIT = 1024
"""Tokens over the requested limit that are accepted: a server may sample several tokens in a step."""
PASSING: Final = frozenset({"Interrupted", "NotReady", "OtherPolicy", "Timeout", "Unreachable", RATE_LIMITED})
"""Reasons of failures in which a server that has the routes may fail too."""
ANSWERS = ("ok", "no")
"""Two answers without a common token, for any tokenizer."""
ADVICE: Final = "serve a mixture-of-experts model, and start the server with --enable-return-routed-experts"
"""For a server without routed experts."""
_EXPECTED: Final = ("choices", "token ids and logprobs of one choice")
"""What an event of a stream must have."""


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
    experts_from: int = 0
    """Position of the first token whose routed experts are to be reported."""
    experts: AnswerExperts | None = None
    """Reported with the last token."""
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
            self.policy_spans, self.finish_reason, self.experts = [], None, None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A request to generate."""

    ids: Sequence[int]
    """The prompt, as the chat template renders it."""
    request: Mapping[str, Any]
    """Fields of the request besides the prompt and the limits, in the server's own format."""
    stops: Stops
    max_tokens: int | None = None
    """Requested limit of the answer."""
    min_tokens: int = 0
    has_grammar: bool = False
    """Whether the answer's tokens must follow a grammar."""
    has_media: bool = False
    """Whether the prompt has placeholders of images, whose positions only the rendering knows."""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer as it arrives; unknown values are empty."""

    ids: Sequence[int] = ()
    """New ids."""
    logprobs: Sequence[float] = ()
    finish_reason: str = ""
    cached_tokens: int = 0
    weight_versions: Any = None
    """As the server reports them; see `weight_versions.py`."""
    experts: Any = None
    """Routed experts at the end of an answer, as the server reports them."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended; unknown values are empty."""

    finish_reason: str = ""
    cached_tokens: int = 0


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

    SERVER: str
    """Name of the inference server, for error messages."""
    GENERATE: str
    """Path of the route that samples."""
    RECOMPUTES: bool = False
    """Whether an update of the weights computes the tokens of running requests again, and their routed experts with them."""

    def __init__(self, client: JsonClient, name: str, experts: RoutedExperts | None = None) -> None:
        self._client, self._name = client, name
        self._experts = experts
        """None: routed experts are not recorded."""
        self._facts: ModelFacts | None = None
        self._learning = asyncio.Lock()

    async def render(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        """Convert a chat request in OpenAI's format into a request to generate."""
        raise NotImplementedError

    async def render_prompt(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        """Convert a completion request into a request to generate."""
        raise NotImplementedError

    async def derender(
        self, chat: Mapping[str, Any], prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        """Return the message of sampled ids, as the server's own parsers read it, without ids. It includes special tokens:
        a rendering without one that was sampled could not continue the conversation's ids.
        """
        raise NotImplementedError

    async def derender_prompt(
        self, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> str:
        """Return the text of sampled ids that continue a bare prompt."""
        raise NotImplementedError

    async def text(self, ids: Sequence[int], options: CallOptions) -> str:
        """Decode ids, special tokens included."""
        raise NotImplementedError

    async def encode(self, text: str, options: CallOptions) -> list[int]:
        """Encode a text without special tokens."""
        raise NotImplementedError

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """Return the fields of a request that would have no effect. `prompt`: the request is not a chat."""
        raise NotImplementedError

    def _generation(
        self, rendered: Rendered, ids: Sequence[int], limit: int | None, least: int, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the body of a streamed request for at most `limit` and at least `least` tokens after `ids`."""
        raise NotImplementedError

    def _asking_experts(self, body: Mapping[str, Any], first: int) -> dict[str, Any]:
        """Return that body, which also asks for the experts of the tokens from position `first` on."""
        raise NotImplementedError

    def _rows(self, reported: Any, tokens: int) -> ExpertRows:
        """Return the routed experts of so many tokens, as reported. May raise ValueError."""
        raise NotImplementedError

    def _chunk(self, event: Any, progress: Progress, before: int) -> Chunk:
        """Read one event. This stream has sent all ids of `progress` except the first `before`. May raise the errors of
        malformed data.
        """
        raise NotImplementedError

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
        self,
        rendered: Rendered,
        progress: Progress,
        options: CallOptions,
        *,
        on_tokens: Callable[[int], None],
        fields: Mapping[str, Any] | None = None,
    ) -> Ending:
        """Generate from `progress`, whose prompt is known, and add what arrives; `on_tokens` gets the number of new
        ids. `fields` are further fields of the request.

        Raises StreamBroken if the answer stops before its end.
        """
        prompt = progress.prompt_ids or []
        if progress.finish_reason is not None:
            return Ending(progress.finish_reason)
        limit = await self._limit(rendered, prompt, options)
        if limit is not None and limit <= len(progress.ids):
            return Ending("length")
        before = len(progress.ids)
        rest = None if limit is None else limit - before
        least = max(0, rendered.min_tokens - before)
        body = self._generation(rendered, [*prompt, *progress.ids], rest, least, fields or {})
        if self._experts is not None:
            body = self._asking_experts(body, progress.experts_from)
        ending = Ending()
        # Some servers repeat all ids in each event, so the whole stream has no limit. The experts of a long prompt come in
        # one event.
        longest = EVENT_BYTES if self._experts is None else ANSWER_BYTES
        async with self._client.stream(self.GENERATE, body, options, is_limited=False, event_bytes=longest) as events:
            async for event in events:
                chunk = self._read(event, progress, before)
                ending = Ending(
                    chunk.finish_reason or ending.finish_reason, chunk.cached_tokens or ending.cached_tokens
                )
                if chunk.ids:
                    progress.ids += chunk.ids
                    progress.logprobs += chunk.logprobs
                if limit is not None and len(progress.ids) > limit + MOST_OVER_LIMIT:
                    raise self._bad(self.GENERATE, "stream", f"at most {limit} tokens", f"{len(progress.ids)} so far")
                if chunk.weight_versions:
                    progress.policy_spans = self._spans(progress, before, chunk.weight_versions)
                if ending.finish_reason and not is_given_up(ending.finish_reason):
                    progress.finish_reason = ending.finish_reason
                    if self._experts is not None and chunk.experts is not None:
                        progress.experts = self._located(chunk.experts, progress, before)
                if chunk.ids:
                    on_tokens(len(chunk.ids))
        if progress.finish_reason is None:
            raise StreamBroken(
                f"{self._client.base_url} aborted an answer (finish reason {ending.finish_reason or None})"
            )
        if self._experts is not None and progress.experts is None:
            raise ModelError(
                "NoRoutedExperts", f"{self._client.base_url} gave an answer without routed experts; {ADVICE}"
            )
        return ending

    async def facts(self, options: CallOptions) -> ModelFacts:
        async with self._learning:
            if self._facts is None:
                first, second = [await self._closed(answer, options) for answer in ANSWERS]
                end = end_of_turn(first, second)
                end_text = "" if end is None else await self.text([end], options)
                self._facts = ModelFacts(await self._max_model_len(options), end, end_text)
            return self._facts

    async def trial(self, options: CallOptions) -> str | None:
        """Check that the routes exist and are compatible. Return None, or the problem.

        Raises ModelError for a failure that says nothing about the routes.
        """
        body = {"model": self._name, "messages": [PROBE], "max_tokens": PROBE_TOKENS}
        progress = Progress()
        try:
            rendered = await self.render(body, options)
            progress.prompt_ids = list(rendered.ids)
            ending = await self.generate(rendered, progress, options, on_tokens=lambda count: None)
            await self.derender(body, progress.prompt_ids, progress.ids, ending.finish_reason, options)
            facts = await self.facts(options)
            await self.text(progress.ids, options)
            closed = await self._closed(ANSWERS[0], options)
            whole = await self._rendered([PROBE, {"role": "assistant", "content": ANSWERS[0]}, PROBE], options)
        except (ModelError, ContextExceeded) as error:
            if isinstance(error, ModelError) and error.reason in PASSING:
                raise
            return str(error)
        if facts.end_of_turn is None:
            return "its chat template closes an answer without a token"
        return None if whole[: len(closed)] == closed else "its chat template rewrites earlier messages in later turns"

    async def _closed(self, answer: str, options: CallOptions) -> list[int]:
        messages = [PROBE, {"role": "assistant", "content": answer}]
        return await self._rendered(messages, options, add_generation_prompt=False)

    async def _rendered(self, messages: Sequence[Message], options: CallOptions, **fields: Any) -> list[int]:
        rendered = await self.render({"model": self._name, "messages": messages, **fields}, options)
        return list(rendered.ids)

    async def _limit(self, rendered: Rendered, prompt: Sequence[int], options: CallOptions) -> int | None:
        """Return the most tokens of the answer."""
        asked = rendered.max_tokens
        longest = (await self.facts(options)).max_model_len
        if longest is None:
            return asked
        if len(prompt) >= longest:
            raise ContextExceeded(f"the prompt has {len(prompt)} tokens, but the model's context is {longest} tokens")
        return min(asked, longest - len(prompt)) if asked is not None else longest - len(prompt)

    async def _max_model_len(self, options: CallOptions) -> int | None:
        raise NotImplementedError

    async def _models(self, options: CallOptions) -> list[Mapping[str, Any]]:
        """Return the server's list of models; empty if it has none."""
        answer = await self._client.call("GET", "/v1/models", None, CallOptions(options.seconds, options.tries))
        entries = answer.payload.get("data") if isinstance(answer.payload, Mapping) else None
        return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []

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

    def _read(self, event: Any, progress: Progress, before: int) -> Chunk:
        try:
            chunk = self._chunk(event, progress, before)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise self._bad(self.GENERATE, *_EXPECTED, event) from None
        try:
            check_tokens(chunk.ids, chunk.logprobs)
        except ValueError as error:
            raise ModelError("BadResponse", f"{self._client.base_url}{self.GENERATE}: {error}") from None
        if len(chunk.logprobs) != len(chunk.ids):
            raise ModelError(
                "NoLogprobs",
                f"{self._client.base_url}{self.GENERATE} gave {len(chunk.ids)} token ids with {len(chunk.logprobs)} "
                "logprobs; a token without logprob cannot be used for training. Check that logprobs are enabled in this "
                "server.",
            )
        return chunk

    def _spans(self, progress: Progress, before: int, said: Any) -> list[PolicySpan]:
        """Return the spans of all tokens so far. In this stream the server has sent all except the first `before`."""
        try:
            spans = reported_spans(said, len(progress.ids) - before)
        except ValueError as error:
            where = f"{self._client.base_url}{self.GENERATE}"
            raise ModelError("BadResponse", f"{where}: weight_versions: {error}") from None
        return extended(progress.policy_spans, before, spans)

    def _located(self, reported: Any, progress: Progress, before: int) -> AnswerExperts | None:
        prompt, top_k = len(progress.prompt_ids or []), self._experts and self._experts.top_k
        tokens, earlier = prompt + len(progress.ids), before
        if self.RECOMPUTES and len(progress.policy_spans) > 1:
            earlier = max(before, len(progress.ids) - progress.policy_spans[-1].tokens)
        try:
            rows = self._rows(reported, tokens - 1 - progress.experts_from)
            if top_k not in (None, rows.top_k):
                raise ValueError(
                    f"model.routedExperts.topK is {top_k}, but the server reports {rows.top_k} for each layer"
                )
            return located(rows, asked_from=progress.experts_from, prompt=prompt, earlier=earlier, tokens=tokens)
        except (TypeError, ValueError) as error:
            where = f"{self._client.base_url}{self.GENERATE}"
            raise ModelError("BadResponse", f"{where}: routed experts: {error}") from None

    def _bad(self, path: str, what: str, expected: str, got: Any) -> ModelError:
        return ModelError(
            "BadResponse", f"{self._client.base_url}{path}: {what}: expected {expected}, got {str(got)[:200]}"
        )
