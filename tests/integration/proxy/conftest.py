"""A proxy on loopback, with a model of the test or a stand-in for vLLM."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from agent_runtime.models.base import Model
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.proxy import handler
from agent_runtime.proxy.ownership import SessionStore
from agent_runtime.proxy.serve import standalone_proxy
from agent_runtime.recording.store import Store
from rollout_api.model import RoutedExperts
from rollout_api.records import Record
from tests.support.package_servers import Servers, package_servers
from tests.support.proxied_model import TokenModel
from tests.support.vllm_server import VllmStandIn

ADMIN = {"Authorization": "Bearer the-admin-key"}


@dataclass
class Proxy:
    """A standalone proxy and its clients."""

    url: str
    store: SessionStore
    http: aiohttp.ClientSession
    stack: contextlib.AsyncExitStack

    async def register(self, name: str, **fields: Any) -> str:
        """Register a session; return its base URL."""
        async with self.http.post(f"{self.url}/sessions/{name}", headers=ADMIN, json=fields) as reply:
            assert reply.status == 201, await reply.text()
            return f"{self.url}{(await reply.json())['base_path']}"

    async def openai(self, name: str, *, max_retries: int = 0, timeout: float = 60, **fields: Any) -> AsyncOpenAI:
        """Return a client of the openai package in a session of its own."""
        client = AsyncOpenAI(
            base_url=await self.register(name, **fields), api_key="unused", max_retries=max_retries, timeout=timeout
        )
        return await self.stack.enter_async_context(client)

    async def records(self, name: str) -> list[Record]:
        """Return the durable records of a session."""
        settings = await self.store.settings(name)
        assert settings is not None
        return await self.store.folder(settings).records()

    async def metric(self, name: str) -> float:
        """Return a metric's value."""
        async with self.http.get(f"{self.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def proxy_over(model: Model, folder: Path, admin_key: str | None = "the-admin-key") -> AsyncIterator[Proxy]:
    """Run a proxy at which sessions are registered."""
    store = Store.open(str(folder), {})
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(standalone_proxy(store, model, admin_key))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        clients = await stack.enter_async_context(contextlib.AsyncExitStack())
        yield Proxy(served.address, SessionStore(store), http, clients)


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Proxies for blocking clients, whose streams send a ping after 0.2 s."""
    with pytest.MonkeyPatch.context() as patch, package_servers(tmp_path_factory.mktemp("proxies")) as servers:
        patch.setattr(handler, "PING_SECONDS", 0.2)
        yield servers


@pytest.fixture
def model() -> TokenModel:
    """The model behind `proxy`."""
    return TokenModel()


@pytest.fixture
async def proxy(model: TokenModel, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A proxy over `model`."""
    async with proxy_over(model, tmp_path) as served:
        yield served


@pytest.fixture
async def engine() -> AsyncIterator[VllmStandIn]:
    """The stand-in behind `vllm_proxy`."""
    async with VllmStandIn() as server:
        yield server


@contextlib.asynccontextmanager
async def opened_vllm(engine: VllmStandIn, experts: RoutedExperts | None = None) -> AsyncIterator[InferenceClient]:
    """Open the stand-in as a model, check it, and forget the requests of that check."""
    vllm = InferenceClient(
        f"{engine.url}/v1", engine.model, headers={}, key_origin="nowhere", call_seconds=60, experts=experts
    )
    await vllm.check()
    engine.served.clear()
    try:
        yield vllm
    finally:
        await vllm.close()


@pytest.fixture
async def vllm_proxy(engine: VllmStandIn, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A proxy over a stand-in for vLLM, whose token ids it records."""
    async with opened_vllm(engine) as vllm, proxy_over(vllm, tmp_path) as served:
        yield served


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that another coroutine does."""
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 the other task knows of no event
            await asyncio.sleep(0.01)
