"""A model behind one server with OpenAI's API; token-exact if it has token routes (docs/token-exact.md)."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypedDict, Unpack

from agent_runtime.executor.timing import working_timeout
from agent_runtime.models.answers import REPEAT_PAUSES, arrived, check_tokens
from agent_runtime.models.base import ModelConfigError, ModelError, ModelReply, ModelRequest, RequestRefused
from agent_runtime.models.http_client import CallOptions, JsonClient
from agent_runtime.models.providers.completions import complete_text, prompt_body
from agent_runtime.models.providers.openai_endpoint import CHECK_SECONDS, CHECK_TRIES, OpenAIEndpoint, without_aborts
from agent_runtime.models.sglang.token_routes import SglangRoutes
from agent_runtime.models.token_exact.routes import Progress, TokenRoutes
from agent_runtime.models.token_exact.turn import ChatForm, Form, PromptForm, TokenTurn
from agent_runtime.models.vllm.token_routes import VllmRoutes
from rollout_api.inference.description import EngineType
from rollout_api.model import RoutedExperts

COUNT_SECONDS = 30.0
"""Time limit of counting a prompt's tokens."""

ROUTES: Final[Mapping[EngineType, type[TokenRoutes]]] = {EngineType.VLLM: VllmRoutes, EngineType.SGLANG: SglangRoutes}

log = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """Options for a caller that distributes its calls over several servers."""

    progress: Progress | None
    """The answer continues from here, and every failure is raised immediately, so that the caller decides where to
    continue. Without it, a broken answer is continued here. Only used by capture Tokens.
    """
    on_tokens: Callable[[int], None] | None
    """Called with the number of new ids after each chunk, when `progress` already has them."""
    cache_salt: str | None
    priority: int | None


class InferenceClient:
    """A `Model`. `base_url` includes `/v1`; `key_origin` says where the key in `headers` was read.

    `engine` is the inference server; without it, `check` finds out whose token routes the server has. With `experts`,
    answers have the routed experts of their tokens; a server that does not report them is refused.
    """

    def __init__(
        self,
        base_url: str,
        name: str,
        *,
        headers: Mapping[str, str],
        key_origin: str,
        call_seconds: float,
        engine: EngineType | None = None,
        experts: RoutedExperts | None = None,
    ) -> None:
        self.name = name
        self._seconds = call_seconds
        self._chat = OpenAIEndpoint(base_url, name, headers=headers, key_origin=key_origin, call_seconds=call_seconds)
        self._client = JsonClient(base_url.rstrip("/").removesuffix("/v1"), headers, key_origin)
        possible = ROUTES.values() if engine is None else (ROUTES[engine],)
        self._possible = [routes(self._client, name, experts) for routes in possible]
        self._experts = experts
        self._tokens = self._possible[0]
        self.token_capture = "TextOnly"

    async def complete(self, request: ModelRequest, **engine: Unpack[EngineOptions]) -> ModelReply:
        """Return one answer; see `Model.complete`."""
        chat = self._chat.body(request)
        if self.token_capture == "Tokens":
            self._check_fields(request, prompt=False)
            return await self._by_tokens(ChatForm(chat, request.prefix), request, engine)
        fields = _engine_fields(engine)
        if self.token_capture == "Chat":
            fields |= {"return_token_ids": True, "logprobs": True}
        return self._exact(await self._chat.complete(request, fields, tries=_tries(engine)))

    async def complete_prompt(
        self, prompt: str | Sequence[int], request: ModelRequest, **engine: Unpack[EngineOptions]
    ) -> ModelReply:
        """Return one completion of a text or of token ids without a chat template; otherwise like `complete`."""
        body = prompt_body(self._chat.body(request), prompt)
        if self.token_capture == "Tokens":
            self._check_fields(request, prompt=True)
            return await self._by_tokens(PromptForm(body), request, engine)
        body |= _engine_fields(engine)
        if self.token_capture == "Chat":
            body |= {"return_token_ids": True, "logprobs": 0}

        async def ask(asked: ModelRequest, seconds: float) -> ModelReply:
            options = replace(self._options(asked, engine), seconds=seconds)
            return await complete_text(self._client, body, options, asked.on_text)

        return self._exact(await without_aborts(ask, request, self._seconds, _tries(engine)))

    async def _by_tokens(self, form: Form, request: ModelRequest, engine: EngineOptions) -> ModelReply:
        options = self._options(request, engine)
        turn = TokenTurn(self._tokens, form, request, options, _engine_fields(engine))
        given = engine.get("progress")
        progress = given or Progress()
        try:
            async with working_timeout(self._seconds):
                return await turn.run(progress, engine.get("on_tokens"), own=given is None)
        except TimeoutError:
            after = f"; the latest failure: {request.health.failing}" if request.health.failing else ""
            failure = ModelError("Timeout", f"{self._client.base_url} did not finish within {self._seconds:g} s{after}")
        except ModelError as error:
            failure = error
        failure.after_tokens = bool(progress.ids)
        raise failure

    def _check_fields(self, request: ModelRequest, *, prompt: bool) -> None:
        """Raise RequestRefused for a field that would have no effect."""
        extra = request.sampling.extra
        for name in self._tokens.without_effect(extra, prompt=prompt):
            form = "a bare prompt" if prompt else "chat"
            raise RequestRefused(
                "BadRequest",
                f"{name}: {extra[name]!r:.100} has no effect on {self._tokens.SERVER}'s token routes for {form}; remove it",
            )

    def _options(self, request: ModelRequest, engine: EngineOptions) -> CallOptions:
        return CallOptions(self._seconds, _tries(engine), {"X-Session-ID": request.session}, request.health)

    def _exact(self, reply: ModelReply) -> ModelReply:
        if self.token_capture == "Chat" and (reply.completion_token_ids is None or reply.logprobs is None):
            raise ModelError(
                "NoLogprobs",
                f"{self._client.base_url} returned token ids and logprobs at the check, but now an answer without "
                "them; it may have been replaced by another server",
            )
        with arrived("BadResponse", self._client.base_url):
            check_tokens(reply.completion_token_ids or (), reply.logprobs or ())
        return reply

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """See `SelectiveModel`. Only the token routes' fields are known."""
        return self._tokens.without_effect(fields, prompt=prompt) if self.token_capture == "Tokens" else []

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See `TokenCounter`; None if the server has no /tokenize."""
        body = {"model": self.name, "messages": request.messages, "tools": request.tools or None}
        answer = await self._client.call("POST", "/tokenize", body, CallOptions(COUNT_SECONDS, tries=1))
        count = answer.payload.get("count") if isinstance(answer.payload, Mapping) else None
        return count if answer.status == 200 and isinstance(count, int) else None

    async def check(self) -> None:
        """Check that the model is served, and choose how token ids are recorded. Raises ModelError."""
        for pause in (*REPEAT_PAUSES, None):
            try:
                await self._check()
            except ModelError as error:
                if pause is None or error.reason != "Interrupted":
                    raise
                await asyncio.sleep(pause)
            else:
                return

    async def _check(self) -> None:
        await self._chat.check()
        self.token_capture = self._chat.token_capture
        if self.token_capture == "Chat":
            options = CallOptions(seconds=min(self._seconds, CHECK_SECONDS), tries=CHECK_TRIES)
            troubles = []
            for routes in self._possible:
                trouble = await routes.trial(options)
                if trouble is None:
                    self._tokens, self.token_capture = routes, "Tokens"
                    return
                troubles.append(f"{routes.SERVER}'s token routes: {trouble}")
            if self._experts is not None:
                raise ModelConfigError(
                    "NoRoutedExperts", f"model.routedExperts: {self._client.base_url} gives none: {'; '.join(troubles)}"
                )
            log.warning(
                "%s: token ids come from chat completions, so long rollouts may fork: %s",
                self.name,
                "; ".join(troubles),
            )

        if self._experts is not None:
            raise ModelConfigError(
                "NoRoutedExperts",
                f"model.routedExperts: {self._client.base_url} returns no token ids, which only vLLM and SGLang do; remove "
                "the field, or use such a server",
            )

    async def close(self) -> None:
        await self._chat.close()
        await self._client.close()


def _engine_fields(engine: EngineOptions) -> dict[str, Any]:
    fields: dict[str, Any] = {"cache_salt": engine.get("cache_salt"), "priority": engine.get("priority")}
    return {name: value for name, value in fields.items() if value is not None}


def _tries(engine: EngineOptions) -> int | None:
    return None if engine.get("progress") is None else 1
