"""A model behind any server with OpenAI's chat completions: vLLM, SGLang, llama.cpp, OpenAI itself."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agent_runtime.executor.timing import working_timeout
from agent_runtime.models.answers import arrived, heard, token_count
from agent_runtime.models.base import (
    AnswerAborted,
    ContextExceeded,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
    end_of,
    is_given_up,
)
from agent_runtime.models.chat_parts import ChatParts
from agent_runtime.models.http_client import Answer, CallOptions, JsonClient
from agent_runtime.models.refusals import final_refusal
from agent_runtime.models.retries import retry_delay
from rollout_api.records import Message, Usage

PATH = "/chat/completions"
CHECK_SECONDS = 60.0  # one short answer of a loaded server
CHECK_TRIES = 4  # about 3 s of retries, so that an unreachable server is reported soon
PROBE_TOKENS = 16  # OpenAI's reasoning models refuse fewer

# Sets of optional fields. The check finds the first set that the server accepts.
OPTIONAL_FIELDS: tuple[dict[str, Any], ...] = (
    {"seed": 0, "logprobs": True, "return_token_ids": True},
    {"seed": 0, "logprobs": True},
    {"seed": 0},
    {},
)
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens")
SGLANG_IDS = "response_token_ids"
"""Field of a choice with its ids (SGLang 0.5.23, srt/entrypoints/openai/protocol.py:1307); vLLM's is `token_ids`."""


class OpenAIEndpoint:
    """A `Model`. Until `check` has run it requests neither token ids nor logprobs."""

    def __init__(
        self, base_url: str, name: str, *, headers: Mapping[str, str], key_origin: str, call_seconds: float
    ) -> None:
        self.name = name
        self.token_capture = "TextOnly"
        self._client = JsonClient(base_url, headers, key_origin)
        self._seconds = call_seconds
        self._max_tokens_field = MAX_TOKENS_FIELDS[0]
        self._optional = OPTIONAL_FIELDS[2]
        self._streams_ids = True

    async def complete(
        self, request: ModelRequest, fields: Mapping[str, Any] | None = None, *, tries: int | None = None
    ) -> ModelReply:
        """Return one answer; see `Model.complete`. `fields` are further fields of the request.

        With tools nothing is streamed if token ids are recorded: vLLM's streamed chat with tools loses them. SGLang
        refuses to stream them.
        """
        body = self.body(request) | dict(fields or {})
        keeps_ids = self.token_capture == "TextOnly" or (self._streams_ids and not request.tools)
        send = self._streamed if request.on_text is not None and keeps_ids else self._whole

        async def ask(asked: ModelRequest, seconds: float) -> ModelReply:
            def options() -> CallOptions:
                return CallOptions(seconds, tries, self.headers(asked, body), request.health)

            try:
                return await send(body, asked, options())
            except ContextExceeded:
                # Servers refuse a prompt that fits if prompt and answer limit together do not fit. Retry without the
                # limit: the context limits the answer.
                if body.pop(self._max_tokens_field, None) is None:
                    raise
                return await send(body, asked, options())

        return await without_aborts(ask, request, self._seconds, tries)

    async def check(self) -> None:
        """Request one short answer, and record which optional fields the server accepts. Raises ModelError."""
        for max_tokens_field in MAX_TOKENS_FIELDS:
            for optional in OPTIONAL_FIELDS:
                answer = await self._probe(max_tokens_field, optional)
                if answer.status == 200:
                    self._streams_ids = SGLANG_IDS not in str(answer.payload)
                    self._remember(max_tokens_field, optional, parse_completion(answer.payload, self._client.base_url))
                    return
                if answer.status not in (400, 422):
                    raise await refused(self._client, PATH, self.name, answer)
                if "max_completion_tokens" in answer.error:
                    break
            else:
                break
        raise ModelConfigError("BadRequest", f"{self._client.base_url} refuses a plain request: {answer.error}")

    async def close(self) -> None:
        await self._client.close()

    def body(self, request: ModelRequest) -> dict[str, Any]:
        sampling = request.sampling
        body = {
            "model": self.name,
            "messages": request.messages,
            **self._optional,
            "seed": request.seed if "seed" in self._optional else None,
            "tools": request.tools or None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._max_tokens_field: request.answer_limit,
            "stop": sampling.stop or None,
        }
        return {name: value for name, value in body.items() if value is not None} | sampling.extra

    def headers(self, request: ModelRequest, _body: Mapping[str, Any]) -> dict[str, str]:
        # Routers in front of several servers send calls of one session to the same one.
        return {"X-Session-ID": request.session}

    async def _whole(self, body: Mapping[str, Any], request: ModelRequest, options: CallOptions) -> ModelReply:
        answer = await self._client.call("POST", PATH, body, options)
        if answer.status != 200:
            raise await refused(self._client, PATH, self.name, answer)
        reply = parse_completion(answer.payload, self._client.base_url)
        if request.on_text is not None and reply.text:
            request.on_text(reply.text)
        return reply

    async def _streamed(self, body: Mapping[str, Any], request: ModelRequest, options: CallOptions) -> ModelReply:
        parts = ChatParts(self._client.base_url)
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with working_timeout(options.seconds), self._client.stream(PATH, body, options) as events:
                async for event in events:
                    options.health.on_tokens(1)
                    piece = parts.add(event)
                    if parts.thought and request.on_reasoning is not None:
                        request.on_reasoning(parts.thought)
                    if piece and request.on_text is not None:
                        request.on_text(piece)
        except TimeoutError:
            raise ModelError("Timeout", f"{self._client.base_url} did not finish within {self._seconds:g} s") from None
        return parse_completion(parts.payload(), self._client.base_url)

    async def _probe(self, max_tokens_field: str, optional: Mapping[str, Any]) -> Answer:
        messages = [{"role": "user", "content": "Say ok."}]
        body = {"model": self.name, "messages": messages, max_tokens_field: PROBE_TOKENS, **optional}
        options = CallOptions(min(self._seconds, CHECK_SECONDS), CHECK_TRIES)
        return await self._client.call("POST", PATH, body, options)

    def _remember(self, max_tokens_field: str, optional: Mapping[str, Any], reply: ModelReply) -> None:
        # Ids without logprobs cannot be trained on.
        with_ids = None not in (reply.prompt_token_ids, reply.completion_token_ids, reply.logprobs)
        self.token_capture = "Chat" if with_ids else "TextOnly"
        self._max_tokens_field = max_tokens_field
        # Do not send accepted fields without effect, which may cost the server time.
        useful = {"seed": True, "logprobs": reply.logprobs is not None, "return_token_ids": with_ids}
        self._optional = {field: value for field, value in optional.items() if useful[field]}


async def without_aborts(
    ask: Callable[[ModelRequest, float], Awaitable[ModelReply]],
    request: ModelRequest,
    seconds: float,
    tries: int | None,
) -> ModelReply:
    """Return the first answer that the server does not abort. `ask` gets the request and the remaining seconds."""
    now, health = asyncio.get_running_loop().time, request.health
    began, lost_before, failures = now(), health.lost_seconds, 0
    asked, has_said = heard(request)
    while True:
        try:
            return await ask(asked, seconds - (now() - began))
        except AnswerAborted as error:
            failures += 1
            health.note(str(error))
            delay = retry_delay(failures, None, now=time.time(), jitter=random.random())
            if has_said() or failures == tries or now() - began + delay >= seconds:
                raise
        await asyncio.sleep(delay)
        health.lost_seconds = lost_before + now() - began


async def refused(client: JsonClient, path: str, model: str, answer: Answer) -> ModelError:
    """Return the error for a final status of the route."""
    if answer.status in (404, 405):
        return ModelConfigError(
            "ModelNotFound",
            f"{client.base_url}{path} answers {answer.status} for model {model!r}: {answer.error}; "
            f"{await _served_models(client, model)}",
        )
    return final_refusal(client.base_url, answer.status, answer.error)


async def _served_models(client: JsonClient, model: str) -> str:
    """Return the server's list of models, as the end of an error message."""
    base = client.base_url
    usual = "it must end before /chat/completions" if base.endswith(PATH) else "it usually ends with /v1"
    try:
        answer = await client.call("GET", "/models", None, CallOptions(10, 1))
        names = [entry["id"] for entry in answer.payload["data"]]
    except (ModelError, TypeError, KeyError):
        return f"it does not list its models at {base}/models either, so check baseURL; {usual}"
    if model in names:
        return f"it lists this model, so check baseURL; {usual}"
    return f"it serves {', '.join(names) or 'no models'}; set endpoint.name to one of these"


def parse_completion(payload: Any, source: str = "the model") -> ModelReply:
    """Parse a chat completion into a reply. Raises ModelError (BadResponse) naming what is missing or of the wrong type, and
    AnswerAborted.

    `source` names the server in that message.
    """
    if not isinstance(payload, Mapping):
        raise ModelError("BadResponse", f"{source}: expected a chat completion as JSON, got {str(payload)[:200]!r}")
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise ModelError("BadResponse", f"{source}: choices: expected a list with one object, got {str(payload)[:200]}")
    choice = choices[0]
    finish_reason = end_of(choice) or "stop"
    if is_given_up(finish_reason):
        raise AnswerAborted(source, finish_reason)
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise ModelError("BadResponse", f"{source}: choices[0].message: expected an object, got {message!r}")
    with arrived("BadResponse", f"{source}: the answer cannot be read"):
        return _reply(payload, choice, message, finish_reason)


def _reply(
    payload: Mapping[str, Any], choice: Mapping[str, Any], given: Mapping[str, Any], finish_reason: str
) -> ModelReply:
    message = _normalised(given)
    completion_ids = _numbers(choice.get("token_ids") or choice.get(SGLANG_IDS))
    logprobs = _logprobs(choice.get("logprobs"))
    if completion_ids is not None and logprobs is not None and len(completion_ids) != len(logprobs):
        # Drop incomplete logprobs: a trainer can compute missing ones, but cannot detect that they are shifted.
        logprobs = None
    return ModelReply(
        message=message,
        finish_reason=finish_reason,
        model=str(payload.get("model") or ""),
        usage=usage_of(payload.get("usage")),
        prompt_token_ids=_numbers(payload.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        completion_token_ids=completion_ids,
        logprobs=logprobs,
        stop_sequence=stop_sequence(choice),
    )


def stop_sequence(choice: Mapping[str, Any]) -> str | None:
    """Return the stop string that ended a choice, from vLLM's `stop_reason` or SGLang's `matched_stop`, where a number
    is a token.
    """
    reason = choice.get("stop_reason") or choice.get("matched_stop")
    return reason if isinstance(reason, str) else None


def _normalised(message: Mapping[str, Any]) -> Message:
    """Return the message in a format that any server accepts back: no nulls, no empty list of calls, each call
    complete.
    """
    kept: Message = {"role": "assistant", "content": None}
    kept |= {name: value for name, value in message.items() if value is not None and name not in ("role", "tool_calls")}
    if not isinstance(kept["content"], str | None):
        raise ModelError(
            "BadResponse", f"choices[0].message.content: expected text or null, got {kept['content']!r:.200}"
        )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ModelError("BadResponse", f"choices[0].message.tool_calls: expected a list, got {calls!r:.200}")
    if calls:
        kept["tool_calls"] = [_normalised_call(call, position) for position, call in enumerate(calls)]
    return kept


def _normalised_call(call: Any, position: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ModelError("BadResponse", f"choices[0].message.tool_calls[{position}]: no function, got {call!r:.200}")
    arguments = function.get("arguments") or ""
    return {
        "id": str(call.get("id") or f"call-{position}"),
        "type": "function",
        "function": {
            "name": str(function.get("name") or ""),
            # Some servers return decoded arguments, against the protocol.
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }


def _numbers(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and value else None


def _logprobs(value: Any) -> list[float] | None:
    content = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(content, list) or not content:
        return None
    try:
        return [float(token["logprob"]) for token in content]
    except (TypeError, KeyError, ValueError):
        raise ModelError("BadResponse", f"choices[0].logprobs.content: no logprob in {content[0]!r:.200}") from None


def usage_of(value: Any) -> Usage:
    """Return token counts, zero if the server gives none. Raises ModelError (BadResponse)."""
    if not isinstance(value, Mapping):
        return Usage()
    details, written = value.get("prompt_tokens_details"), value.get("completion_tokens_details")
    try:
        return Usage(
            prompt_tokens=token_count(value.get("prompt_tokens")),
            completion_tokens=token_count(value.get("completion_tokens")),
            cached_tokens=token_count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0,
            reasoning_tokens=token_count(written.get("reasoning_tokens")) if isinstance(written, Mapping) else 0,
        )
    except (TypeError, ValueError, OverflowError):
        raise ModelError("BadResponse", f"usage: expected whole numbers, got {value!r:.200}") from None
