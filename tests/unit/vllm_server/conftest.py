"""A client of a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import aiohttp
import pytest

from tests.support.vllm_server import VllmStandIn

MESSAGES: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is there?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


class Client:
    """Sends and reads what a test requests."""

    def __init__(self, server: VllmStandIn, session: aiohttp.ClientSession) -> None:
        self.server, self._session = server, session

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a POST; return status and body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(path, json=body, headers=named) as response:
            return response.status, _decoded(await response.text())

    async def get(self, path: str) -> Any:
        """Send a GET; return the body of a 200."""
        async with self._session.get(path) as response:
            assert response.status == 200, await response.text()
            return _decoded(await response.text())

    async def events(self, path: str, body: Any, **headers: str) -> AsyncIterator[Any]:
        """Yield the events of a stream, up to [DONE]. Raises aiohttp.ClientError if it breaks off."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(path, json=body, headers=named) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    if line == b"data: [DONE]\n":
                        return
                    yield json.loads(line.removeprefix(b"data: "))
            raise aiohttp.ClientPayloadError("the stream ended without [DONE]")

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """Return an answered chat completion."""
        status, answer = await self.post("/v1/chat/completions", {"model": "policy", "messages": MESSAGES, **fields})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer


Standin: TypeAlias = Callable[..., AbstractAsyncContextManager[Client]]


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.002)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.fixture
def standin() -> Standin:
    """Start a stand-in with these options; yields a client of it."""

    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Client]:
        async with VllmStandIn(**options) as server, aiohttp.ClientSession(server.url) as session:
            yield Client(server, session)

    return start
