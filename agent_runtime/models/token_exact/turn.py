"""One answer over the token routes: a prompt of ids, sampled ids, and their message."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_runtime.models.answers import reasoning_of
from agent_runtime.models.base import CallHealth, ModelReply, ModelRequest, TokenPrefix
from agent_runtime.models.http_client import CallOptions, StreamBroken
from agent_runtime.models.retries import retry_delay
from agent_runtime.models.token_exact.answer_text import PartialAnswers, Stops, TextStream, cut_at_stop
from agent_runtime.models.token_exact.routes import Ending, Progress, Rendered, TokenRoutes
from agent_runtime.models.token_exact.weight_versions import extended
from agent_runtime.models.token_history import experts_from
from rollout_api.records import Usage


class ChatForm:
    """Converts messages to a prompt, and the answer's ids to a message; `body` is the request in OpenAI's format."""

    def __init__(self, body: Mapping[str, Any], prefix: TokenPrefix | None) -> None:
        self._body, self._prefix = body, prefix

    async def render(self, routes: TokenRoutes, options: CallOptions) -> Rendered:
        return await routes.render(self._body, options)

    async def prompt(self, routes: TokenRoutes, rendered: Rendered, options: CallOptions) -> list[int]:
        """Return the ids to continue from: the stored ones and the new ones."""
        # Image placeholders have positions in the rendering, which stored ids lack.
        if self._prefix is None or rendered.has_media:
            return list(rendered.ids)
        ended_by = () if rendered.stops.kept else rendered.stops.strings
        return await routes.prompt_after(self._prefix.ids, rendered.ids, ended_by, options)

    async def read(
        self, routes: TokenRoutes, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        """Return the message of sampled ids, without ids."""
        reply = await routes.derender(self._body, prompt, ids, finish, options)
        if self._body.get("parallel_tool_calls") is False and len(reply.tool_calls) > 1:
            # vLLM's chat route does the same; derendering does not.
            reply.message["tool_calls"] = reply.message["tool_calls"][:1]
        # Derendering keeps the finish reason; vLLM's chat route changes it to tool_calls.
        return replace(reply, finish_reason="tool_calls") if reply.tool_calls and finish == "stop" else reply


class PromptForm:
    """Like ChatForm, for a bare prompt; `body` is the request of a completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    async def render(self, routes: TokenRoutes, options: CallOptions) -> Rendered:
        return await routes.render_prompt(self._body, options)

    async def prompt(self, routes: TokenRoutes, rendered: Rendered, options: CallOptions) -> list[int]:
        return list(rendered.ids)

    async def read(
        self, routes: TokenRoutes, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        text = await routes.derender_prompt(prompt, ids, finish, options)
        return ModelReply({"role": "assistant", "content": text}, finish, self._body["model"])


Form = ChatForm | PromptForm


class TokenTurn:
    """One call."""

    def __init__(
        self, routes: TokenRoutes, form: Form, request: ModelRequest, options: CallOptions, fields: Mapping[str, Any]
    ) -> None:
        self._routes, self._form, self._request, self._options = routes, form, request, options
        self._fields = fields
        """Further fields of the request to generate."""
        self._stops = Stops((), frozenset(), kept=False)
        self._rendered = Rendered((), {}, self._stops)
        self._stream: TextStream | None = None
        self._partial: PartialAnswers | None = None

    async def run(self, progress: Progress, on_tokens: Callable[[int], None] | None, *, own: bool) -> ModelReply:
        """Return the answer; see `InferenceClient.complete`. `own`: a broken answer is continued here."""
        self._rendered = await self._form.render(self._routes, self._options)
        self._stops = self._rendered.stops
        progress.has_grammar = self._rendered.has_grammar
        if progress.prompt_ids is None:
            progress.prompt_ids = await self._form.prompt(self._routes, self._rendered, self._options)
            if (prefix := self._request.prefix) is not None:
                progress.experts_from = experts_from(prefix.experts, prefix.ids, progress.prompt_ids)
        self._request.health.on_prompt(len(progress.prompt_ids))
        if self._request.on_text is not None:
            held_back = () if self._stops.kept else self._stops.strings
            self._stream = TextStream(
                self._request.on_text,
                tools=bool(self._request.tools),
                stops=held_back,
                on_reasoning=self._request.on_reasoning,
            )
            self._partial = PartialAnswers(lambda ids: self._text(progress, ids), self._stream)

        def arrived(count: int) -> None:
            if on_tokens is not None:
                on_tokens(count)
            self._request.health.on_tokens(count)
            # The last token may be one that closes the answer, which is not in its text.
            if self._partial is not None and progress.finish_reason is None:
                self._partial.grown(progress.ids)

        try:
            ending = await self._generate(progress, arrived, own=own)
        finally:
            if self._partial is not None:
                await self._partial.stop()
        reply = await self._reply(progress, ending)
        if self._stream is not None:
            self._stream.finish(reply.text, reasoning_of(reply.message))
        return reply

    async def _generate(self, progress: Progress, arrived: Callable[[int], None], *, own: bool) -> Ending:
        failures, health = 0, self._request.health
        while True:
            before, began = len(progress.ids), time.monotonic()
            try:
                return await self._routes.generate(
                    self._rendered, progress, self._options, on_tokens=arrived, fields=self._fields
                )
            except StreamBroken as error:
                if not own:
                    raise
                failures = 1 if len(progress.ids) > before else failures + 1
                if not progress.can_continue:
                    if not await self._restart(progress):
                        raise
                    health.lost_seconds += time.monotonic() - began
                health.note(str(error))
                delay = retry_delay(failures, None, now=time.time(), jitter=random.random())
                await asyncio.sleep(delay)
                health.lost_seconds += delay

    async def _restart(self, progress: Progress) -> bool:
        """Drop the received part of the answer; False if a client has already read some of it."""
        if self._partial is not None:
            await self._partial.stop()
        if self._stream is not None and self._stream.has_begun:
            return False
        progress.keep(0)
        return True

    async def _reply(self, progress: Progress, ending: Ending) -> ModelReply:
        prompt = progress.prompt_ids or []
        ids, stop = await self._said(progress.ids, ending.finish_reason)
        read = await self._read(prompt, ids, ending.finish_reason, self._options)
        return replace(
            read,
            usage=Usage(
                prompt_tokens=len(prompt), completion_tokens=len(progress.ids), cached_tokens=ending.cached_tokens
            ),
            prompt_token_ids=list(prompt),
            completion_token_ids=list(progress.ids),
            logprobs=list(progress.logprobs),
            policy_spans=extended(progress.policy_spans, len(progress.ids)),
            stop_sequence=stop,
            routed_experts=progress.experts,
        )

    async def _read(self, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions) -> ModelReply:
        if not ids:  # vLLM refuses to derender an empty list
            return ModelReply({"role": "assistant", "content": ""}, finish, self._rendered.model)
        return await self._form.read(self._routes, prompt, ids, finish, options)

    async def _said(self, ids: Sequence[int], finish: str) -> tuple[Sequence[int], str | None]:
        """Return the ids of the answer's text without its ending, and the stop string that ended it.

        A stop string may begin inside a token. Then the text before it is encoded again, for parsing only; the sampled
        ids are recorded and continued from.
        """
        if finish != "stop" or not ids:
            return ids, None
        spoken = await self._unclosed(ids)
        if len(spoken) < len(ids):
            return spoken, None
        if self._stops.strings:
            text = await self._routes.text(ids, self._options)
            before = await self._routes.text(ids[:-1], self._options) if ids[1:] else ""
            if (cut := cut_at_stop(text, before, self._stops)) is not None:
                stop, said = cut
                return await self._routes.encode(said, self._options) if said else [], stop
        # A model may have several tokens that close an answer, and only one of them is in renderings.
        return ids if self._stops.kept or self._stops.has_pattern else ids[:-1], None

    async def _unclosed(self, ids: Sequence[int]) -> Sequence[int]:
        """Remove the token that closed the answer, whose text is not part of it."""
        facts = await self._routes.facts(self._options)
        closed = ids[-1] == facts.end_of_turn or (ids[-1] in self._stops.tokens and not self._stops.kept)
        return ids[:-1] if closed else ids

    async def _text(self, progress: Progress, ids: Sequence[int]) -> tuple[str, str]:
        """Return the text and the reasoning of a part of the answer. It is a separate call whose failures are ignored."""
        options = replace(self._options, tries=1, health=CallHealth())
        reply = await self._read(progress.prompt_ids or [], await self._unclosed(ids), "length", options)
        return "" if reply.tool_calls else reply.text, reasoning_of(reply.message)
