"""The runner's end of a model port, over a network that breaks, and with fencing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agent_runtime.sandboxes.base import Fence, Fenced
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold
from agent_runtime.sandboxes.executor_client.model_port import serve_model


class Network:
    """A TCP port that forwards to the executor until it is cut."""

    def __init__(self, executor: Any) -> None:
        self.is_down = False
        self._socket = executor.socket
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Break all open connections."""
        for writer in self._open:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.transport.abort()
            return
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket)
        self._open |= {writer, inner_writer}
        await asyncio.gather(self._move(reader, inner_writer), self._move(inner_reader, writer))
        self._open -= {writer, inner_writer}

    @staticmethod
    async def _move(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        writer.close()


@pytest.fixture
async def network(executor: Any) -> AsyncIterator[tuple[Network, int]]:
    """A network to the executor, and its port."""
    network = Network(executor)
    server = await asyncio.start_server(network.carry, "127.0.0.1", 0)
    yield network, server.sockets[0].getsockname()[1]
    server.close()
    network.cut()


@contextlib.asynccontextmanager
async def served(client: Any, port: int, server: web.Server) -> AsyncIterator[str]:
    """Serve the model port of the client's workspace over that network."""
    epoch, holder = client.fence.split(":")
    connection = ExecutorClient(f"tcp:127.0.0.1:{port}", client.token)
    hold = Hold(client.attempt, Fence(int(epoch), holder))
    async with serve_model(connection, hold, f"/workspaces/{client.workspace}", server) as url:
        yield url
    await connection.close()


def fetch(url: str) -> list[str]:
    """Return a command that sends a request and prints the last line of the reply."""
    port = url.rpartition(":")[2]
    return [
        "bash",
        "-c",
        f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET / HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n' >&3; tail -n1 <&3",
    ]


async def test_network_failure_is_hidden_from_a_program_without_a_started_answer(
    client: Any, network: tuple[Network, int]
) -> None:
    way, port = network
    begun: asyncio.Queue[None] = asyncio.Queue()
    tries = 0

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        begun.put_nowait(None)
        await asyncio.sleep(60 if tries < 3 else 0)
        return web.Response(text=f"try {tries}")

    async with served(client, port, web.Server(answer, handler_cancellation=True)) as url:
        running = asyncio.create_task(client.out(fetch(url)))
        for _ in range(2):
            await asyncio.wait_for(begun.get(), 120)
            way.is_down = True
            way.cut()
            await asyncio.sleep(0.2)
            way.is_down = False
        assert await running == "try 3"


def says(text: str) -> web.Server:
    """Return a model that always gives this answer."""

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=text)

    return web.Server(answer)


async def test_superseded_runner_gets_no_more_requests_and_its_successor_does(
    client: Any, network: tuple[Network, int]
) -> None:
    async with served(client, network[1], says("old")) as url:
        assert await client.out(fetch(url)) == "old"
        new = client.held_by("2:new")
        await new.raise_fence()
        running = asyncio.create_task(new.out(fetch(url)))
        await asyncio.sleep(0.3)
        assert not running.done()
        async with served(new, network[1], says("new")) as same:
            assert (same, await running) == (url, "new")


async def test_unauthorised_runner_gets_an_immediate_error(client: Any, network: tuple[Network, int]) -> None:
    with pytest.raises(Fenced):
        async with served(client.held_by("9:stranger"), network[1], says("nothing")):
            pass
