"""A model behind one server that speaks OpenAI's protocol; token-exact where that is a vLLM that offers it.

How token ids are recorded is chosen once, by `check` (docs/token-exact.md).
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agent_runtime.models.base import ModelError, ModelReply, ModelRequest
from agent_runtime.models.http_client import JsonClient, StreamBroken
from agent_runtime.models.openai_endpoint import CHECK_SECONDS, CHECK_TRIES, OpenAIEndpoint
from agent_runtime.models.retries import retry_delay
from agent_runtime.models.vllm.text_stream import PartialAnswers, TextStream
from agent_runtime.models.vllm.token_routes import CallOptions, Ending, Progress, TokenRoutes
from rollout_api.records import Usage

__all__ = ["Progress", "VllmServer"]


class VllmServer:
    """A `Model`. `base_url` goes up to and including `/v1`; `key_origin` says where the key in `headers` was read."""

    def __init__(
        self, base_url: str, name: str, *, headers: Mapping[str, str], key_origin: str, call_seconds: float
    ) -> None:
        self.name = name
        self._seconds = call_seconds
        self._chat = OpenAIEndpoint(base_url, name, headers=headers, key_origin=key_origin, call_seconds=call_seconds)
        self._client = JsonClient(base_url.rstrip("/").removesuffix("/v1"), headers, key_origin)
        self._tokens = TokenRoutes(self._client, name)
        self.token_capture = "TextOnly"

    async def complete(
        self,
        request: ModelRequest,
        *,
        progress: Progress | None = None,
        on_tokens: Callable[[int], None] | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
    ) -> ModelReply:
        """One answer; see `Model.complete`.

        With `progress` the answer goes on from what that has, and every failure is raised at once, for the caller to
        decide where to go on; without it a broken answer is gone on with here. `on_tokens` is called with the number of new
        ids after each chunk, when `progress` has them already. Only capture Tokens fills and uses what `progress` has.
        """
        if self.token_capture == "Tokens":
            options = CallOptions(
                seconds=self._seconds,
                tries=None if progress is None else 1,
                headers={"X-Session-ID": request.session},
                health=request.health,
            )
            turn = _TokenTurn(self._tokens, self._chat.body(request), request, options, cache_salt, priority)
            try:
                async with asyncio.timeout(self._seconds):
                    return await turn.run(progress, on_tokens)
            except TimeoutError:
                after = f"; the latest failure: {request.health.failing}" if request.health.failing else ""
                raise ModelError(
                    "Timeout", f"{self._client.base_url} did not finish within {self._seconds:g} s{after}"
                ) from None
        fields: dict[str, Any] = {}
        if self.token_capture == "Chat":
            fields |= {"return_token_ids": True, "logprobs": True}
        if cache_salt is not None:
            fields["cache_salt"] = cache_salt
        if priority is not None:
            fields["priority"] = priority
        reply = await self._chat.complete(request, fields, tries=None if progress is None else 1)
        if self.token_capture == "Chat" and (reply.completion_token_ids is None or reply.logprobs is None):
            raise ModelError(
                "NoLogprobs",
                f"{self._client.base_url} gave token ids and logprobs when it was checked, and now an answer without "
                "them; was it replaced by another server?",
            )
        return reply

    async def check(self) -> None:
        """Find out whether the model is served, and choose how token ids are recorded. Raises ModelError."""
        await self._chat.check()
        self.token_capture = self._chat.token_capture
        if self.token_capture == "Chat":
            options = CallOptions(seconds=min(self._seconds, CHECK_SECONDS), tries=CHECK_TRIES)
            if await self._tokens.trial(options) is None:
                self.token_capture = "Tokens"

    async def close(self) -> None:
        """Close connections."""
        await self._chat.close()
        await self._client.close()


class _TokenTurn:
    """One answer by way of the token routes."""

    def __init__(
        self,
        routes: TokenRoutes,
        chat: Mapping[str, Any],
        request: ModelRequest,
        options: CallOptions,
        cache_salt: str | None,
        priority: int | None,
    ) -> None:
        self._routes, self._chat, self._request, self._options = routes, chat, request, options
        self._cache_salt, self._priority = cache_salt, priority
        self._rendered: dict[str, Any] = {}

    async def run(self, given: Progress | None, on_tokens: Callable[[int], None] | None) -> ModelReply:
        progress = Progress() if given is None else given
        self._rendered = await self._routes.render(self._chat, self._options)
        if progress.prompt_ids is None:
            progress.prompt_ids = await self._prompt()
        stream = None
        if self._request.on_text is not None:
            stream = TextStream(self._request.on_text, tools=bool(self._request.tools))
        partial = None if stream is None else PartialAnswers(lambda ids: self._text(progress, ids), stream)

        def arrived(count: int) -> None:
            if on_tokens is not None:
                on_tokens(count)
            if partial is not None:
                partial.grown(progress.ids)

        try:
            ending = await self._generate(progress, arrived, own=given is None)
        finally:
            if partial is not None:
                await partial.stop()
        reply = await self._reply(progress, ending)
        if stream is not None:
            stream.finish(reply.text)
        return reply

    async def _prompt(self) -> list[int]:
        rendered: list[int] = self._rendered["token_ids"]
        prefix = self._request.prefix
        # Ids that stand for images have places in the rendering that stored ids do not have.
        if prefix is None or self._rendered.get("features"):
            return list(rendered)
        return await self._routes.prompt_after(prefix.ids, rendered, self._options)

    async def _generate(self, progress: Progress, arrived: Callable[[int], None], *, own: bool) -> Ending:
        failures, health = 0, self._request.health
        while True:
            before = len(progress.ids)
            try:
                return await self._routes.generate(
                    self._rendered,
                    progress,
                    self._options,
                    on_tokens=arrived,
                    cache_salt=self._cache_salt,
                    priority=self._priority,
                )
            except StreamBroken as error:
                if not own:
                    raise
                failures = 1 if len(progress.ids) > before else failures + 1
                health.failing = str(error)
                delay = retry_delay(failures, None, now=time.time(), jitter=random.random())
                await asyncio.sleep(delay)
                health.lost_seconds += delay

    async def _reply(self, progress: Progress, ending: Ending) -> ModelReply:
        prompt = progress.prompt_ids or []
        read = await self._routes.derender(self._chat, prompt, progress.ids, ending.finish_reason, self._options)
        # Derendering gives the finish reason back as it was; vLLM's chat route names tool calls.
        named = "tool_calls" if read.tool_calls and ending.finish_reason == "stop" else ending.finish_reason
        return replace(
            read,
            finish_reason=named,
            usage=Usage(
                prompt_tokens=len(prompt), completion_tokens=len(progress.ids), cached_tokens=ending.cached_tokens
            ),
            prompt_token_ids=list(prompt),
            completion_token_ids=list(progress.ids),
            logprobs=list(progress.logprobs),
        )

    async def _text(self, progress: Progress, ids: Any) -> str:
        """The text of a part of the answer. In a call of its own, whose failures are nobody's."""
        options = replace(self._options, tries=1, health=type(self._options.health)())
        reply = await self._routes.derender(self._chat, progress.prompt_ids or [], ids, "length", options)
        return "" if reply.tool_calls else reply.text
