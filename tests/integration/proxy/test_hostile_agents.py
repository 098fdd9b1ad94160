"""An agent that floods the proxy, sends too much or reads nothing gets a clear answer, and other sessions are not
affected.
"""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.proxy import app, body_queue
from agent_runtime.proxy.limits import Limits
from agent_runtime.recording.messages import undelivered_turns
from tests.integration.proxy.conftest import Proxy, proxy_over, until
from tests.support.proxied_model import TokenModel

CALLS = 500


class OneIsHeld(TokenModel):
    """Answers all sessions except `hostile`. Its answers wait for `released`, and may be long."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.running = self.most = 0
        self.text = ""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """See TokenModel."""
        if request.session == "hostile":
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.released.wait()
            finally:
                self.running -= 1
            if self.text and request.on_text is not None:
                request.on_text(self.text)
        return await super().complete(request)


@pytest.fixture
def model() -> OneIsHeld:
    """The model behind `proxy`."""
    return OneIsHeld()


@pytest.fixture
async def urls(proxy: Proxy) -> tuple[str, str]:
    """Base URLs of the sessions `hostile` and `good`."""
    return await proxy.register("hostile"), await proxy.register("good")


@pytest.fixture
async def flood() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without a limit of connections."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        yield client


async def status(client: aiohttp.ClientSession, url: str, content: str = "Hi.", **fields: Any) -> tuple[int, str]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]} | fields
    async with client.post(f"{url}/chat/completions", data=BytesIO(json.dumps(body).encode())) as reply:
        return reply.status, await reply.text()


async def test_500_concurrent_calls_wait_for_places_and_do_not_block_other_sessions(
    proxy: Proxy, model: OneIsHeld, urls: tuple[str, str], flood: aiohttp.ClientSession
) -> None:
    hostile, good = urls
    calls = [asyncio.create_task(status(flood, hostile, f"Call {number}")) for number in range(CALLS)]
    await until(lambda: model.running == Limits().concurrent_calls)
    assert (await status(proxy.http, good))[0] == 200
    assert not any(call.done() for call in calls)
    model.released.set()
    assert {code for code, _ in await asyncio.gather(*calls)} == {200}
    assert model.most == Limits().concurrent_calls


async def test_20_megabytes_are_answered_and_over_the_limit_refused_with_it(
    proxy: Proxy, model: OneIsHeld, urls: tuple[str, str], flood: aiohttp.ClientSession
) -> None:
    model.released.set()
    hostile, good = urls
    small = await proxy.register("small", limits={"bodyBytes": 1 << 20})
    large = "x" * 20_000_000
    answers = await asyncio.gather(
        *(status(flood, hostile, f"{number}{large}") for number in range(3)),
        status(flood, small, large),
        status(proxy.http, good),
    )
    assert [code for code, _ in answers] == [200, 200, 200, 413, 200]
    assert "more than 1048576 bytes" in answers[3][1]


async def test_costly_refused_bodies_do_not_delay_other_sessions(
    proxy: Proxy, urls: tuple[str, str], flood: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_queue, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(body_queue, "SHARE", 1e-4)
    hostile, good = urls
    many = [{"role": "user", "content": "x"}] * 20_000
    calls = [asyncio.create_task(status(flood, hostile, model="other", messages=many)) for _ in range(5)]
    ended, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert (await status(proxy.http, good))[0] == 200
    assert [call.result()[0] for call in ended] == [404]
    assert [call.done() for call in calls].count(False) == 4
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_pages_of_a_long_conversation_do_not_delay_other_sessions(
    proxy: Proxy, model: OneIsHeld, urls: tuple[str, str], flood: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.released.set()
    hostile, good = urls
    body = json.dumps({"model": "tiny", "input": [{"role": "user", "content": "x"}] * 100_000}).encode()
    async with flood.post(f"{hostile}/responses", data=io.BytesIO(body)) as reply:
        page = f"{hostile}/responses/{(await reply.json())['id']}/input_items"
    monkeypatch.setattr(body_queue, "BURST_SECONDS", 0.05)  # some hundred short calls
    monkeypatch.setattr(body_queue, "SHARE", 1e-4)
    pages = [asyncio.create_task(flood.get(page)) for _ in range(5)]
    assert {(await status(proxy.http, good))[0] for _ in range(20)} == {200}
    assert not any(task.done() for task in pages), "the session has used its time up with its conversation"
    for task in pages:
        task.cancel()
    await asyncio.gather(*pages, return_exceptions=True)


async def test_client_that_never_reads_its_stream_is_dropped_and_its_answer_is_no_sample(
    tmp_path: Path, model: OneIsHeld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "DELIVERY_SECONDS", 0.5)
    model.released.set()
    model.text = "x" * 50_000_000  # more than the kernel's buffers hold
    async with proxy_over(model, tmp_path) as proxy:
        hostile, good = await proxy.register("hostile"), await proxy.register("good")
        path = hostile.removeprefix(proxy.url)
        body = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Hi."}]})
        request = f"POST {path}/chat/completions HTTP/1.1\r\nHost: m\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        port = int(proxy.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request.encode())
            await until(lambda: bool(model.asked))
            assert (await status(proxy.http, good))[0] == 200

            async def is_marked() -> bool:
                model.text = ""
                await status(proxy.http, hostile, "Go on.")
                return 0 in undelivered_turns(await proxy.records("hostile"))

            while not await is_marked():  # noqa: ASYNC110 a record of the proxy, which another call writes
                await asyncio.sleep(0.2)
