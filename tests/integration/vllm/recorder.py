"""A reverse proxy in front of a server. It records requests and answers, hides routes and breaks streams."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.s3 import serving

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
SGLANG_GENERATE = "/generate"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass
class Sampled:
    """One answer: the ids of its prompt, and the sampled ones."""

    session: str
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: Any = None

    def read(self, answer: dict[str, Any]) -> None:
        if (info := answer.get("meta_info")) is not None:  # SGLang: each event has only new tokens
            self.ids += answer["output_ids"]
            self.logprobs += [float(entry[0]) for entry in info.get("output_token_logprobs") or ()]
            self.weight_versions = info.get("weight_versions") or self.weight_versions
        self.prompt_ids = answer.get("prompt_token_ids") or self.prompt_ids
        for choice in answer.get("choices", ()):
            self.ids += choice.get("token_ids") or []
            content = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [float(entry["logprob"]) for entry in content]
            self.weight_versions = choice.get("weight_versions") or self.weight_versions

    def versions(self) -> list[str]:
        """Return the version of each token, as the server reports it."""
        spans = self.weight_versions or []
        return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


@dataclass
class Recorder:
    """Records all requests, and applies its faults to further ones."""

    upstream: str
    url: str = ""
    sampled: list[Sampled] = field(default_factory=list)
    """Answers of rollouts and tests. A client's own checks, which name no session, are left out."""
    hidden: frozenset[str] = frozenset()
    """Ends of paths that get 404."""
    cut_after: int | None = None
    """Number of tokens after which the connection of the next stream breaks, once."""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["Recorder"]:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        async with aiohttp.ClientSession(auto_decompress=False) as self._http, serving(application) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield self

    def of(self, session: str) -> list[Sampled]:
        return [one for one in self.sampled if f"-{one.session}".endswith(f"-{session}")]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith(tuple(self.hidden)):
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.read()
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        one = self._begin(request, body)
        async with self._http.request(
            request.method, f"{self.upstream}{request.raw_path}", data=body, headers=kept
        ) as answer:
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            if "text/event-stream" not in answer.headers.get("Content-Type", ""):
                data = await answer.read()
                if one is not None and answer.status == 200:
                    one.read(json.loads(data))
                return web.Response(body=data, status=answer.status, headers=passed)
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for line in answer.content:
                if one is not None:
                    for event in _events(line):
                        one.read(event)
                    if self.cut_after is not None and len(one.ids) >= self.cut_after:
                        self.cut_after = None
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                await response.write(line)
            return response

    def _begin(self, request: web.Request, body: bytes) -> Sampled | None:
        session = request.headers.get("X-Session-ID")
        if session is None or request.path not in (GENERATE, CHAT, SGLANG_GENERATE):
            return None
        asked = json.loads(body)
        one = Sampled(session, asked, list(asked.get("token_ids") or asked.get("input_ids") or ()))
        self.sampled.append(one)
        return one


def _events(line: bytes) -> Iterator[dict[str, Any]]:
    if line.startswith(b"data: {"):
        yield json.loads(line[6:])


def extends(later: Sampled, earlier: Sampled) -> bool:
    seen = [*earlier.prompt_ids, *earlier.ids]
    return later.prompt_ids[: len(seen)] == seen


def sequences(answers: list[Sampled]) -> list[list[tuple[int, int, float]]]:
    """Return (id, mask, logprob) of each token of the sequences that the server saw. A prompt that does not extend the
    last one begins another.
    """
    found: list[list[tuple[int, int, float]]] = []
    for number, one in enumerate(answers):
        if not (number and extends(one, answers[number - 1])):
            found.append([])
        found[-1] += [(token, 0, 0.0) for token in one.prompt_ids[len(found[-1]) :]]
        found[-1] += [(token, 1, logprob) for token, logprob in zip(one.ids, one.logprobs, strict=True)]
    return found
