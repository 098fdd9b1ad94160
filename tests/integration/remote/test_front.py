"""One port for many trials: each call reaches the trial of its key, and ends with it."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from agent_runtime.integrations.harbor_server.model_routers import ModelRouter
from agent_runtime.proxy.keys import new_key


class Model:
    """Answers with its name, or hangs."""

    def __init__(self, name: str) -> None:
        self.name, self.held = name, asyncio.Event()
        self.held.set()
        self.asked, self.stopped = asyncio.Event(), asyncio.Event()
        self.server = web.Server(self.answer)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.set()
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return web.Response(text=f"{self.name} {(await request.read()).decode()}")


@pytest.fixture
async def front() -> AsyncIterator[ModelRouter]:
    serving = ModelRouter("127.0.0.1", 0, "127.0.0.1")
    await serving.open()
    yield serving
    await serving.close()


async def ask(front: ModelRouter, key: str, *, in_path: bool) -> tuple[int, str]:
    headers = {} if in_path else {"Authorization": f"Bearer {key}"}
    path = f"/{key}/v1/chat/completions" if in_path else "/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(front.url + path, data="hello", headers=headers) as reply:
        return reply.status, await reply.text()


async def test_trials_of_one_name_are_separated_by_keys_and_unknown_keys_refused(front: ModelRouter) -> None:
    keys, models = [new_key("rollout-0-0") for _ in range(3)], [Model("a"), Model("b")]
    async with (
        front.serving([keys[0].rpartition(".")[2]], models[0].server),
        front.serving([keys[1].rpartition(".")[2]], models[1].server),
    ):
        for in_path in (True, False):
            assert [await ask(front, key, in_path=in_path) for key in keys[:2]] == [(200, "a hello"), (200, "b hello")]
            assert (await ask(front, keys[2], in_path=in_path))[0] == 401
    assert (await ask(front, keys[0], in_path=True))[0] == 401


async def test_call_of_an_ended_attempt_is_cancelled_at_the_model(front: ModelRouter) -> None:
    key, model = new_key("rollout-0-0"), Model("a")
    model.held.clear()
    async with front.serving([key.rpartition(".")[2]], model.server):
        asking = asyncio.create_task(ask(front, key, in_path=True))
        await asyncio.wait_for(model.asked.wait(), 30)

    await asyncio.wait_for(model.stopped.wait(), 30)
    with pytest.raises(aiohttp.ClientError):
        await asking


async def test_a_client_that_goes_away_stops_its_model_call(front: ModelRouter) -> None:
    key, model = new_key("rollout-0-0"), Model("a")
    model.held.clear()
    async with front.serving([key.rpartition(".")[2]], model.server):
        asking = asyncio.create_task(ask(front, key, in_path=True))
        await asyncio.wait_for(model.asked.wait(), 30)
        asking.cancel()
        await asyncio.wait_for(model.stopped.wait(), 30)
