"""Builds answers: text, logprobs and usage, and streams of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support.vllm_server.engine import Request
from tests.support.vllm_server.tokenizer import TextStream, tokenizer

if TYPE_CHECKING:
    from tests.support.vllm_server.server import VllmStandIn

DONE = b"data: [DONE]\n\n"


class ConnectionCut(Exception):
    """The connection was cut on purpose, so no answer can be sent."""


class AnswerText:
    """The text of an answer in progress, without special tokens, and cut where a stop string begins."""

    def __init__(self, request: Request) -> None:
        self._stream = TextStream(tokenizer())
        self._stop, self._keeps = request.stop, request.keeps_stop
        self._hold = max(map(len, self._stop), default=1) - 1
        self._kept = ""

    def feed(self, ids: Sequence[int], finish: str | None) -> str:
        """Return the text that is certain after these ids."""
        # vLLM's detokenizer holds back the bytes of an incomplete character, also at the end.
        self._kept += self._stream.feed(ids)
        if finish is None:
            ready = self._kept[: max(len(self._kept) - self._hold, 0)] if self._hold else self._kept
        else:
            found = [at + len(stop) * self._keeps for stop in self._stop if (at := self._kept.find(stop)) >= 0]
            ready = self._kept[: min(found, default=len(self._kept))]
        self._kept = self._kept[len(ready) :]
        return ready


def text_of(request: Request) -> str:
    """Return the text of an answer that has ended."""
    return AnswerText(request).feed(request.ids, request.finish)


def usage(request: Request) -> dict[str, Any]:
    """vLLM 0.26, vllm/entrypoints/serve/engine/protocol.py: UsageInfo."""
    prompt, completion = len(request.prompt), len(request.ids)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens} if request.cached_tokens else None,
    }


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], top: int, *, as_ids: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """vLLM 0.26, vllm/entrypoints/openai/chat_completion/protocol.py: ChatCompletionLogProbs.

    With `as_ids` each token is written as `token_id:N`. The only alternative is the sampled token itself.
    """
    pieces = tokenizer().pieces
    content: list[dict[str, Any]] = []
    for token, logprob in zip(ids, logprobs, strict=True):
        data = pieces[token]
        entry: dict[str, Any] = {
            "token": f"token_id:{token}" if as_ids else data.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": None if as_ids else list(data),
        }
        content.append({**entry, "top_logprobs": [entry] if top else []})
    return {"content": content}


def generate_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, list[dict[str, Any]]]:
    """vLLM 0.32, vllm/entrypoints/scale_out/token_in_token_out/protocol.py: GenerateLogProbs.

    The sampled token is also one of the alternatives with `logprobs: 0`.
    """
    content: list[dict[str, Any]] = []
    for token, logprob in zip(ids, logprobs, strict=True):
        entry = {"token_id": token, "logprob": logprob, "rank": 1}
        content.append({**entry, "top_logprobs": [entry]})
    return {"content": content}


def completion_logprobs(ids: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
    """vLLM 0.26, vllm/entrypoints/openai/completion/protocol.py: CompletionLogProbs."""
    tokens = [tokenizer().pieces[token].decode("utf-8", "replace") for token in ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": list(logprobs),
        "tokens": tokens,
        "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
    }


def event(payload: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def whole(server: VllmStandIn, http: web.Request, request: Request) -> None:
    """Wait for the whole answer; abort it if the client disconnects."""
    await asyncio.sleep(server.faults.slow)
    server.engine.add(request)
    try:
        if request.drop_after is None:
            await request.done()
            return
        async for _, made, finish in request.chunks():
            if made >= request.drop_after or finish is not None:
                cut(http)
                server.engine.disconnected(request)
                raise ConnectionCut
    except asyncio.CancelledError:
        server.engine.disconnected(request)
        raise


async def pieces(request: Request) -> AsyncIterator[tuple[int, int, str | None]]:
    """Yield the chunks of an answer. Raises ConnectionCut where the connection is to be cut."""
    async for start, end, finish in request.chunks():
        if request.drop_after is not None and (end >= request.drop_after or finish is not None):
            if start < min(end, request.drop_after):
                yield start, min(end, request.drop_after), None
            raise ConnectionCut
        yield start, end, finish


async def stream(
    server: VllmStandIn, http: web.Request, request: Request, events: AsyncIterator[bytes]
) -> web.StreamResponse:
    """Send events as they come; abort the request if the client disconnects."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await asyncio.sleep(server.faults.slow)
    server.engine.add(request)
    try:
        await response.prepare(http)
        async for data in events:
            await response.write(data)
        await response.write(DONE)
        await response.write_eof()
    except ConnectionCut:
        await asyncio.sleep(0)
        cut(http)
        server.engine.disconnected(request)
    except ConnectionError:
        server.engine.disconnected(request)
    except asyncio.CancelledError:
        server.engine.disconnected(request)
        raise
    return response


def cut(http: web.Request) -> None:
    """Close the connection before the answer's end."""
    if http.transport is not None:
        http.transport.close()
