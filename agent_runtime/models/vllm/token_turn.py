"""One answer by way of the token routes: a prompt of ids, sampled ids, and the message that they stand for."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_runtime.models.base import CallHealth, ModelReply, ModelRequest, TokenPrefix
from agent_runtime.models.http_client import CallOptions, StreamBroken
from agent_runtime.models.retries import retry_delay
from agent_runtime.models.vllm.answer_text import PartialAnswers, Stops, TextStream, cut_at_stop
from agent_runtime.models.vllm.token_routes import Ending, Progress, TokenRoutes
from agent_runtime.models.vllm.weight_versions import extended
from rollout_api.records import Usage


class ChatForm:
    """How messages are asked, and how the ids of the answer are read; `body` is the request in OpenAI's form."""

    def __init__(self, body: Mapping[str, Any], prefix: TokenPrefix | None) -> None:
        self._body, self._prefix = body, prefix

    async def render(self, routes: TokenRoutes, options: CallOptions) -> dict[str, Any]:
        return await routes.render(self._body, options)

    async def prompt(self, routes: TokenRoutes, rendered: Mapping[str, Any], options: CallOptions) -> list[int]:
        """The ids to continue from: the stored ones and what is new."""
        # Ids that stand for images have places in the rendering that stored ids do not have.
        if self._prefix is None or rendered.get("features"):
            return list(rendered["token_ids"])
        stops = Stops.of(rendered["sampling_params"])
        ended_by = () if stops.kept else stops.strings
        return await routes.prompt_after(self._prefix.ids, rendered["token_ids"], ended_by, options)

    async def read(
        self, routes: TokenRoutes, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        """The message of sampled ids, without ids."""
        reply = await routes.derender(self._body, prompt, ids, finish, options)
        if self._body.get("parallel_tool_calls") is False and len(reply.tool_calls) > 1:
            # As vLLM's chat route does it; derendering leaves them.
            reply.message["tool_calls"] = reply.message["tool_calls"][:1]
        # Derendering gives the finish reason back as it was; vLLM's chat route names tool calls.
        return replace(reply, finish_reason="tool_calls") if reply.tool_calls and finish == "stop" else reply


class PromptForm:
    """As ChatForm, of a bare prompt; `body` is the request of a completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    async def render(self, routes: TokenRoutes, options: CallOptions) -> dict[str, Any]:
        return await routes.render_prompt(self._body, options)

    async def prompt(self, routes: TokenRoutes, rendered: Mapping[str, Any], options: CallOptions) -> list[int]:
        return list(rendered["token_ids"])

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
        self._rendered: dict[str, Any] = {}
        self._stops = Stops((), frozenset(), kept=False)

    async def run(self, progress: Progress, on_tokens: Callable[[int], None] | None, *, own: bool) -> ModelReply:
        """The answer; see `VllmServer.complete`. `own`: a broken answer is continued here."""
        self._rendered = await self._form.render(self._routes, self._options)
        self._stops = Stops.of(self._rendered["sampling_params"])
        if progress.prompt_ids is None:
            progress.prompt_ids = await self._form.prompt(self._routes, self._rendered, self._options)
        stream = None
        if self._request.on_text is not None:
            held_back = () if self._stops.kept else self._stops.strings
            stream = TextStream(self._request.on_text, tools=bool(self._request.tools), stops=held_back)
        partial = None if stream is None else PartialAnswers(lambda ids: self._text(progress, ids), stream)

        def arrived(count: int) -> None:
            if on_tokens is not None:
                on_tokens(count)
            if partial is not None:
                partial.grown(progress.ids)

        try:
            ending = await self._generate(progress, arrived, own=own)
        finally:
            if partial is not None:
                await partial.stop()
        reply = await self._reply(progress, ending)
        if stream is not None:
            stream.finish(reply.text)
        return reply

    async def _generate(self, progress: Progress, arrived: Callable[[int], None], *, own: bool) -> Ending:
        failures, health = 0, self._request.health
        while True:
            before = len(progress.ids)
            try:
                request = {**self._rendered, **self._fields}
                return await self._routes.generate(request, progress, self._options, on_tokens=arrived)
            except StreamBroken as error:
                if not own:
                    raise
                failures = 1 if len(progress.ids) > before else failures + 1
                health.note(str(error))
                delay = retry_delay(failures, None, now=time.time(), jitter=random.random())
                await asyncio.sleep(delay)
                health.lost_seconds += delay

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
        )

    async def _read(self, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions) -> ModelReply:
        if not ids:  # vLLM refuses to derender nothing
            return ModelReply({"role": "assistant", "content": ""}, finish, self._rendered.get("model") or "")
        return await self._form.read(self._routes, prompt, ids, finish, options)

    async def _said(self, ids: Sequence[int], finish: str) -> tuple[Sequence[int], str | None]:
        """Ids of the answer's text without what ended it, and the stop string that did.

        A stop string may begin in the middle of a token. Then the text before it is encoded anew, to be read; what is
        recorded, and gone on from, are the sampled ids.
        """
        if finish != "stop" or not ids:
            return ids, None
        spoken = await self._unclosed(ids)
        if len(spoken) < len(ids) or not self._stops.strings:
            return spoken, None
        text = await self._routes.text(ids, self._options)
        before = await self._routes.text(ids[:-1], self._options) if ids[1:] else ""
        if (cut := cut_at_stop(text, before, self._stops)) is None:
            return ids, None
        stop, said = cut
        return await self._routes.encode(said, self._options) if said else [], stop

    async def _unclosed(self, ids: Sequence[int]) -> Sequence[int]:
        """Without the token that closed the answer, whose text is not the answer's."""
        facts = await self._routes.facts(self._options)
        closed = ids[-1] == facts.end_of_turn or (ids[-1] in self._stops.tokens and not self._stops.kept)
        return ids[:-1] if closed else ids

    async def _text(self, progress: Progress, ids: Sequence[int]) -> str:
        """The text of a part of the answer. In a call of its own, whose failures are nobody's."""
        options = replace(self._options, tries=1, health=CallHealth())
        reply = await self._read(progress.prompt_ids or [], await self._unclosed(ids), "length", options)
        return "" if reply.tool_calls else reply.text
