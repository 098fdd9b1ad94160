"""verl's LLM servers as a model with token ids in and out, so that verl trains on exactly the tokens that its servers
sampled.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agent_runtime.models.base import ContextExceeded, ModelError, ModelReply, ModelRequest, TokenPrefix
from agent_runtime.models.routed_experts import AnswerExperts, joined, located, rows_of
from agent_runtime.models.token_history import experts_from
from rollout_api.records import Message, PolicySpan, Usage

CALL_SECONDS = 1800
"""Deadline of one answer: an agent's default time. verl's servers have no deadline, and may hang."""
RESUME_SECONDS = 1.0
"""Pause between the pieces of an answer that a weight update interrupted, as in verl's FullyAsyncLLMServerClient."""
ABORTED = ("abort", "aborted")


class TokenOutput(Protocol):
    """The fields of `verl.workers.rollout.replica.TokenOutput` that are read."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None
    extra_fields: Mapping[str, Any]
    routed_experts: Any
    """A numpy array [tokens, layers, experts in each] of all tokens but the last, with `enable_rollout_routing_replay`."""


Generate = Callable[..., Awaitable[TokenOutput]]
"""`verl.workers.rollout.llm_server.LLMServerClient.generate`."""


class Chat(Protocol):
    """Converts messages to token ids and back for verl's model."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer besides its own end; may be a plain attribute."""

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        """Return the token ids of a conversation and the start of the next answer. They begin with the prefix if
        possible.
        """

    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of an answer without its end, and its tool calls in OpenAI's format, without ids if it has
        none.
        """


class LLMClientModel:
    """A `Model`. `context` is the limit of tokens of prompt and answer together, `name` the name that agents use."""

    token_capture = "Tokens"

    def __init__(
        self, generate: Generate, chat: Chat, *, context: int, call_seconds: float = CALL_SECONDS, name: str = "verl"
    ) -> None:
        self.name = name
        self._generate, self._chat, self._context, self._seconds = generate, chat, context, call_seconds
        self._id = uuid.uuid4().hex
        """Distinguishes sessions with equal names of other jobs, which use other servers."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return one answer; see `Model.complete`. After a weight update the answer is continued, and each piece has
        its own version.
        """
        prompt = await self._chat.prompt(request.messages, request.tools, request.prefix)
        left = self._context - len(prompt)
        if left < 1:
            raise ContextExceeded(
                f"the prompt has {len(prompt)} tokens; prompt and answer together are limited to {self._context}"
            )
        limit = min(most for most in (left, request.max_tokens, request.sampling.max_tokens) if most is not None)
        pieces: list[TokenOutput] = []
        try:
            async with asyncio.timeout(self._seconds):
                await self._sample(request, prompt, limit, pieces)
                return await self._reply(request, prompt, pieces, limit)
        except TimeoutError:
            failure = ModelError("Timeout", f"verl gave no answer within {self._seconds:g} s")
        except ModelError as error:
            failure = error
        failure.after_tokens = any(piece.token_ids for piece in pieces)
        raise failure

    async def check(self) -> None:
        """Do nothing: verl has started its servers before it creates a manager."""

    async def close(self) -> None:
        """Do nothing: the servers belong to verl."""

    async def _sample(
        self, request: ModelRequest, prompt: Sequence[int], limit: int, pieces: list[TokenOutput]
    ) -> None:
        ids: list[int] = []
        while True:
            try:
                piece = await self._generate(
                    f"{self._id}-{request.session}",
                    prompt_ids=[*prompt, *ids],
                    sampling_params=self._sampling(request, limit - len(ids)),
                )
            except Exception as error:
                # Exceptions of a server count as infrastructure failures, because the policy cannot cause them.
                raise ModelError("Unreachable", f"verl's LLM server: {_summary(error)}") from error
            if piece.token_ids and (piece.log_probs is None or len(piece.log_probs) != len(piece.token_ids)):
                raise ModelError("NoLogprobs", "verl's LLM server returned token ids without logprobs")
            pieces.append(piece)
            ids += piece.token_ids
            if piece.stop_reason not in ABORTED or len(ids) >= limit:
                return
            request.health.on_hold(True)
            try:
                await asyncio.sleep(RESUME_SECONDS)
            finally:
                request.health.on_hold(False)
            request.health.held_seconds += RESUME_SECONDS

    def _sampling(self, request: ModelRequest, limit: int) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {**sampling.extra, "logprobs": True, "max_tokens": limit}
        if sampling.temperature is not None:
            params["temperature"] = sampling.temperature
        if sampling.top_p is not None:
            params["top_p"] = sampling.top_p
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if self._chat.stop_token_ids:
            params["stop_token_ids"] = [*(params.get("stop_token_ids") or []), *self._chat.stop_token_ids]
        return params

    async def _reply(
        self, request: ModelRequest, prompt: list[int], pieces: Sequence[TokenOutput], limit: int
    ) -> ModelReply:
        ids = [token for piece in pieces for token in piece.token_ids]
        try:
            text, calls = await self._chat.read(ids, request.tools, request.sampling.stop)
        except Exception as error:
            raise ModelError("BadAnswer", f"verl's tool parser cannot read the answer: {_summary(error)}") from error
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call-{request.turn}-{position}"} | call for position, call in enumerate(calls)
            ]
        cut_off = len(ids) >= limit
        return ModelReply(
            message=message,
            finish_reason="length" if cut_off else "tool_calls" if calls else "stop",
            model=self.name,
            usage=Usage(
                prompt_tokens=len(prompt),
                completion_tokens=len(ids),
                cached_tokens=pieces[0].extra_fields.get("num_cached_tokens") or 0,
            ),
            prompt_token_ids=prompt,
            completion_token_ids=ids,
            logprobs=[logprob for piece in pieces for logprob in piece.log_probs or []],
            policy_spans=_spans(pieces),
            routed_experts=_experts(request, prompt, pieces),
        )


def _summary(error: Exception) -> str:
    """Return the last line of Ray's error, which is a traceback: it has the server's exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _spans(pieces: Sequence[TokenOutput]) -> list[PolicySpan]:
    """Return the weight version of each token: verl's training step at which they were loaded. Empty if no server
    reports any. Tokens that a client joined over a weight update have None, so they are not trained.
    """
    steps = [_steps(piece.extra_fields) for piece in pieces]
    if not any(steps):
        return []
    return [
        PolicySpan(tokens=len(piece.token_ids), version=str(*reported) if len(reported) == 1 else None)
        for piece, reported in zip(pieces, steps, strict=True)
        if piece.token_ids
    ]


def _experts(request: ModelRequest, prompt: Sequence[int], pieces: Sequence[TokenOutput]) -> AnswerExperts | None:
    """Return the routed experts of an answer. Those of a later piece begin with the last token of the earlier ones, which
    they have not processed; the rest of it was processed again.
    """
    prefix, found, begin, end = request.prefix, list[AnswerExperts](), 0, len(prompt)
    if prefix is not None:
        begin = experts_from(prefix.experts, prefix.ids, prompt)
    for piece in pieces:
        end += len(piece.token_ids)
        if piece.routed_experts is not None and begin < end - 1:
            array = piece.routed_experts
            try:
                rows = rows_of(array.tobytes(), array.dtype.itemsize, array.shape)
                part = located(rows, asked_from=begin, prompt=len(prompt), earlier=0, tokens=end)
            except ValueError as error:
                raise ModelError("BadResponse", f"verl's LLM server: routed experts: {error}") from None
            found += [part] if part is not None else []
        begin = end - 1
    return joined(found)


def _steps(extra_fields: Mapping[str, Any]) -> set[int]:
    """Return the first and the last step whose weights sampled a piece; empty if its server reports none."""
    step = extra_fields.get("global_steps")
    return {extra_fields.get(name, step) for name in ("min_global_steps", "max_global_steps")} - {None}
