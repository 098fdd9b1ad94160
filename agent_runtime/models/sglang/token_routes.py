"""SGLang's token-in, token-out routes (0.5.23; file and line below `sglang/srt`).

/tokenize renders messages (entrypoints/openai/serving_tokenize.py:95), /generate takes and returns ids
(entrypoints/http_server.py:928), and /detokenize, /separate_reasoning and /parse_function_call read a message
(http_server.py:1734-1830) with the parsers that the server names in /model_info.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.models.base import ModelConfigError, ModelReply, is_given_up
from agent_runtime.models.http_client import CallOptions, JsonClient
from agent_runtime.models.refusals import final_refusal
from agent_runtime.models.routed_experts import ExpertRows, parse_flat
from agent_runtime.models.sglang.supported_fields import GRAMMARS, TEMPLATE, sampling_params, without_effect
from agent_runtime.models.token_exact.answer_text import Stops
from agent_runtime.models.token_exact.routes import Chunk, Progress, Rendered, TokenRoutes
from rollout_api.model import RoutedExperts

DEFAULT_COMPLETION_TOKENS = 16
"""/v1/completions' own default (entrypoints/openai/protocol.py:365)."""

THINK = "<think>"
"""Text that opens reasoning in the templates of most models."""
MARKER_TOKENS = 8
"""Tokens at the end of a prompt in which that text is searched."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the parsers with which the server was started; None: it has none."""

    tool_calls: str | None
    reasoning: str | None


class SglangRoutes(TokenRoutes):
    """The routes of one SGLang."""

    SERVER = "SGLang"
    GENERATE = "/generate"
    RECOMPUTES = True  # see RETRACT of rollout_api/inference/sglang.py

    def __init__(self, client: JsonClient, name: str, experts: RoutedExperts | None = None) -> None:
        super().__init__(client, name, experts)
        self._parsers: Parsers | None = None

    async def render(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        """See `TokenRoutes`."""
        await self._check_support(body, options)
        kept = TEMPLATE | {"add_generation_prompt", "continue_final_message", "messages", "tools"}
        asked = {name: body[name] for name in kept & body.keys() if body[name] is not None}
        ids = self._ids("/tokenize", await self._post("/tokenize", {"model": self._name, **asked}, options))
        return self._request(body, ids, body.get("max_tokens") or body.get("max_completion_tokens"))

    async def render_prompt(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        """See `TokenRoutes`."""
        prompt, limit = body["prompt"], body.get("max_tokens") or DEFAULT_COMPLETION_TOKENS
        if not isinstance(prompt, str):
            return self._request(body, list(prompt), limit)
        asked = {"model": self._name, "prompt": prompt}
        ids = self._ids("/tokenize", await self._post("/tokenize", asked, options))
        return self._request(body, ids, limit)

    async def derender(
        self, chat: Mapping[str, Any], prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        """See `TokenRoutes`."""
        parsers = await self._known_parsers(options)
        tools = chat.get("tools") if _takes_tools(chat) else None
        said = _whole(await self.text(ids, options))
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if parsers.reasoning is not None:
            asked = {"text": await self._opened(prompt, said, options), "reasoning_parser": parsers.reasoning}
            found = await self._post("/separate_reasoning", asked, options)
            message["content"] = self._text("/separate_reasoning", found, "text")
            if thought := self._text("/separate_reasoning", found, "reasoning_text"):
                message["reasoning_content"] = thought
        if tools and parsers.tool_calls is not None:
            asked = {"text": message["content"], "tools": tools, "tool_call_parser": parsers.tool_calls}
            found = await self._post("/parse_function_call", asked, options)
            message["content"] = self._text("/parse_function_call", found, "normal_text")
            if calls := self._calls(found, parsers.tool_calls, chat):
                message["tool_calls"] = calls
        return ModelReply(message, finish, self._name)

    async def derender_prompt(
        self, prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> str:
        """See `TokenRoutes`."""
        return _whole(await self._decoded(ids, options, with_special=False))

    async def text(self, ids: Sequence[int], options: CallOptions) -> str:
        """See `TokenRoutes`."""
        return await self._decoded(ids, options, with_special=True)

    async def encode(self, text: str, options: CallOptions) -> list[int]:
        """See `TokenRoutes`."""
        body = {"model": self._name, "prompt": text, "add_special_tokens": False}
        return self._ids("/tokenize", await self._post("/tokenize", body, options))

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """See `TokenRoutes`."""
        return without_effect(fields, prompt=prompt)

    async def _check_support(self, body: Mapping[str, Any], options: CallOptions) -> None:
        """Raise ModelConfigError for tools without a parser and for images, which SGLang would silently ignore."""
        where = self._client.base_url
        if _takes_tools(body) and (await self._known_parsers(options)).tool_calls is None:
            raise ModelConfigError(
                "NoToolParser",
                f"{where} cannot read tool calls; start SGLang with --tool-call-parser (toolCallParser of a ModelServer), "
                "or give the agent no tools",
            )
        contents = (message.get("content") for message in body["messages"])
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if other := {str(part.get("type")) for part in parts} - {"text"}:
            raise ModelConfigError(
                "TextModel",
                f"{where} renders messages without their {', '.join(sorted(other))}: SGLang's token routes take text only; "
                "serve the model with vLLM, or use an agent that sends text",
            )

    async def _opened(self, prompt: Sequence[int], said: str, options: CallOptions) -> str:
        """Return an answer with the marker that opens its reasoning, if the template has written it into the prompt."""
        end = (await self.text(prompt[-MARKER_TOKENS:], options)).rstrip()
        return f"{THINK}{said}" if end.endswith(THINK) else said

    def _request(self, body: Mapping[str, Any], ids: list[int], limit: int | None) -> Rendered:
        sampling = sampling_params(body)
        stops = Stops.of({**sampling, "include_stop_str_in_output": sampling.get("no_stop_trim")})
        extra = {"extra_key": body["extra_key"]} if body.get("extra_key") is not None else {}
        return Rendered(
            ids=ids,
            request={"sampling_params": sampling, **extra},
            stops=stops,
            max_tokens=limit,
            min_tokens=body.get("min_tokens") or 0,
            has_grammar=any(name in sampling for name in GRAMMARS),
            model=self._name,
        )

    def _generation(
        self, rendered: Rendered, ids: Sequence[int], limit: int | None, least: int, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        sampling = {**rendered.request["sampling_params"], "min_new_tokens": least}
        if limit is not None:
            sampling["max_new_tokens"] = limit
        return {
            **rendered.request,
            **fields,
            "model": self._name,  # the gateway of a ModelServer reads the adapter's name here; SGLang ignores it
            "input_ids": list(ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }

    def _asking_experts(self, body: Mapping[str, Any], first: int) -> dict[str, Any]:
        self._top_k()
        return {**body, "return_routed_experts": True, "routed_experts_start_len": first}

    def _chunk(self, event: Any, progress: Progress, before: int) -> Chunk:
        said = event["meta_info"]
        ids, count, received = list(event["output_ids"]), int(said["completion_tokens"]), len(progress.ids) - before
        logprobs = [float(entry[0]) for entry in said.get("output_token_logprobs") or []]
        finish = str((said.get("finish_reason") or {}).get("type") or "")
        cached = int(said.get("cached_tokens") or 0)
        new = count - received
        if len(ids) == count and ids[:received] == progress.ids[before:]:
            # Without --incremental-streaming-output each event repeats all ids so far.
            ids = ids[received:]
        elif len(ids) != new:
            if finish and is_given_up(finish):
                # SGLang repeats the last id when it aborts a waiting call (managers/tokenizer_manager.py:
                # _handle_abort_req), so the ids that did not arrive before are unknown.
                return Chunk(finish_reason=finish, cached_tokens=cached)
            raise self._bad(self.GENERATE, "output_ids", f"{new} new ids (completion_tokens {count})", ids)
        return Chunk(
            ids,
            logprobs[max(0, len(logprobs) - new) :],
            finish,
            cached,
            said.get("weight_versions"),
            said.get("routed_experts"),
        )

    def _rows(self, reported: Any, tokens: int) -> ExpertRows:
        return parse_flat(reported, self._top_k(), tokens)

    def _top_k(self) -> int:
        if self._experts is None or self._experts.top_k is None:
            raise ModelConfigError(
                "NoRoutedExperts", "SGLang does not report how many experts a token has; set model.routedExperts.topK"
            )
        return self._experts.top_k

    async def _max_model_len(self, options: CallOptions) -> int | None:
        # The first is the model itself. Its name becomes the folder of the weights that were loaded last
        # (managers/tokenizer_manager.py:2368).
        models = await self._models(options)
        length = models[0].get("max_model_len") if models else None
        return length if isinstance(length, int) else None

    async def _known_parsers(self, options: CallOptions) -> Parsers:
        if self._parsers is None:
            path = "/model_info"
            answer = await self._client.call("GET", path, None, CallOptions(options.seconds, options.tries))
            if answer.status != 200 or not isinstance(answer.payload, Mapping):
                raise final_refusal(f"{self._client.base_url}{path}", answer.status, answer.error)
            said = answer.payload
            self._parsers = Parsers(said.get("tool_call_parser"), said.get("reasoning_parser"))
        return self._parsers

    async def _decoded(self, ids: Sequence[int], options: CallOptions, *, with_special: bool) -> str:
        body = {"model": self._name, "tokens": list(ids), "skip_special_tokens": not with_special}
        return self._text("/detokenize", await self._post("/detokenize", body, options), "text")

    def _ids(self, path: str, answer: Mapping[str, Any]) -> list[int]:
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
            raise self._bad(path, "tokens", "a list of whole numbers", answer)
        return ids

    def _text(self, path: str, answer: Mapping[str, Any], name: str) -> str:
        text = answer.get(name)
        if not isinstance(text, str):
            raise self._bad(path, name, "text", answer)
        return text

    def _calls(self, answer: Mapping[str, Any], parser: str, chat: Mapping[str, Any]) -> list[dict[str, Any]]:
        before = sum(len(message.get("tool_calls") or []) for message in chat["messages"])
        try:
            return [
                {
                    "id": _call_id(parser, str(call["name"]), before + number),
                    "type": "function",
                    "function": {"name": str(call["name"]), "arguments": str(call["parameters"])},
                }
                for number, call in enumerate(answer["calls"])
            ]
        except (KeyError, TypeError):
            raise self._bad("/parse_function_call", "calls", "a list of calls", answer) from None


def _call_id(parser: str, name: str, number: int) -> str:
    """Return an id as the chat route makes it (serving_chat.py:3129): Kimi's templates read the number in it."""
    known = {"kimi_k2": f"functions.{name}:{number}", "kimi_k3": f"{name}:{number}"}
    return known.get(parser) or f"call_{uuid.uuid4().hex[:24]}"


def _takes_tools(chat: Mapping[str, Any]) -> bool:
    return bool(chat.get("tools")) and chat.get("tool_choice") != "none"


def _whole(text: str) -> str:
    """Return the text without the first bytes of a character with which an answer was cut off."""
    return text.rstrip("\ufffd")
