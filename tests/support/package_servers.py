"""Session proxies for the blocking clients of the packages that agents use."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
from aiohttp import web

from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.proxy.serve import standalone_proxy
from agent_runtime.recording.store import Store
from tests.support.chat_upstream import ChatUpstream
from tests.support.vllm_server import Answer, ToolCall, VllmStandIn

ADMIN_KEY = "the-admin-key"
SCRIPT = {
    "tools": [Answer("", [ToolCall("run", {"command": "ls"})])],
    "par": [Answer("", [ToolCall("run", {"command": "a"}), ToolCall("run", {"command": "b"})])],
    "stop": [Answer("before STOP after")],
}


@dataclass
class Servers:
    """Three proxies, and the requests to the upstream of the first two."""

    plain_url: str
    hasty_url: str
    """URL of the proxy whose calls have one second."""
    exact_url: str
    upstream: ChatUpstream
    numbers: "itertools.count[int]"
    stack: contextlib.ExitStack

    def key(self, *, exact: bool = False, hasty: bool = False, name: str | None = None) -> tuple[str, str]:
        url = self.exact_url if exact else self.hasty_url if hasty else self.plain_url
        path = f"{url}/sessions/{name or f's{next(self.numbers)}'}"
        reply = httpx2.post(path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, json={})
        return url, str(reply.json()["key"])

    def gpt(self, **session: Any) -> openai.OpenAI:
        """Return a client of the openai package in a session of its own."""
        url, key = self.key(**session)
        return self.stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0))

    def claude(self, **session: Any) -> anthropic.Anthropic:
        """Return a client of the anthropic package in a session of its own."""
        url, key = self.key(**session)
        return self.stack.enter_context(anthropic.Anthropic(base_url=url, api_key=key, max_retries=0))

    @property
    def asked(self) -> dict[str, Any]:
        return self.upstream.bodies[-1]


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[str, str, str, ChatUpstream]]:
    async with contextlib.AsyncExitStack() as stack:
        upstream = ChatUpstream()
        runner = web.AppRunner(upstream.app())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = await stack.enter_async_context(VllmStandIn(model="m", script=SCRIPT))
        urls: list[str] = []
        plain = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        for base, seconds in ((plain, 60), (plain, 1), (f"{engine.url}/v1", 60)):
            model = InferenceClient(base, "m", headers={}, key_origin="nowhere", call_seconds=seconds)
            stack.push_async_callback(model.close)
            await model.check()
            store = Store.open(str(folder / str(len(urls))), {})
            urls.append((await stack.enter_async_context(standalone_proxy(store, model, ADMIN_KEY))).address)
        yield urls[0], urls[1], urls[2], upstream


@contextlib.contextmanager
def package_servers(folder: Path) -> Iterator[Servers]:
    """Run the servers in a separate thread, so that tests can use the packages' blocking clients."""
    ready, found = threading.Event(), []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        try:
            async with running(folder) as urls:
                found.append(urls)
                ready.set()
                await stop.wait()
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(60)
    try:
        with contextlib.ExitStack() as stack:
            assert found
            yield Servers(*found[0], itertools.count(), stack)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
