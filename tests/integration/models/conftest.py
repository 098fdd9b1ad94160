"""A real server on loopback with the formats of OpenAI and Anthropic, which can fail in every way."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from agent_runtime.models.base import Model, ModelRequest
from agent_runtime.models.factory import open_model
from rollout_api.model import ModelSpec
from tests.support.model_requests import model_request

Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def completion(**overrides: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    plain = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return plain | overrides


@dataclass
class Server:
    """Answers with the `planned` behaviours one after another, then with `usual`."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    planned: deque[Behaviour] = field(default_factory=deque)
    served: list[str] = field(default_factory=lambda: ["m", "other"])
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    usual: dict[str, Any] = field(default_factory=completion)

    def plan(self, *behaviours: Behaviour) -> None:
        self.planned.extend(behaviours)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.arrived.set()
        if self.planned:
            return await self.planned.popleft()(request, body)
        return web.json_response(self.usual)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.served]})

    async def hang(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        raise AssertionError("nobody closed the connection")


def status(code: int, payload: Any = None, headers: dict[str, str] | None = None) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if isinstance(payload, str):
            return web.Response(status=code, text=payload, headers=headers)
        return web.json_response(payload or {"error": {"message": f"status {code}"}}, status=code, headers=headers)

    return behave


async def drop_mid_body(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", state.answer)
    app.router.add_post("/v1/messages", state.answer)
    app.router.add_get("/v1/models", state.models)
    # Without it aiohttp lets a handler run on when its client has gone, and no server could stop generating.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield state
    await runner.cleanup()


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Callable[..., Model]]:
    """Opens models on the server, as a manifest would, and closes them."""
    opened: list[Model] = []

    def open_one(**endpoint: Any) -> Model:
        spec = {"baseURL": server.url, "name": "m", "callSeconds": 20, "apiKeyFrom": {"env": "TEST_KEY"}} | endpoint
        model = open_model(ModelSpec.model_validate({"endpoint": spec}), {"TEST_KEY": "secret-key-of-the-job\n"})
        opened.append(model)
        return model

    yield open_one
    for model in opened:
        await model.close()


@pytest.fixture
def make_request() -> Callable[..., ModelRequest]:
    return model_request


@pytest.fixture
def faults() -> dict[str, Callable[..., Behaviour]]:
    async def dropped(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await drop_mid_body(request, body)

    return {"status": status, "drop": lambda: dropped}
