"""The runner's end of a model port before a request: it reads untrusted data of a sandbox."""

import asyncio

import pytest
from aiohttp import web

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.executor_client.client import ExecutorClient
from agent_runtime.sandboxes.executor_client.connection import MAX_HEAD_BYTES
from agent_runtime.sandboxes.executor_client.model_port import UPGRADE, ModelConnection

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: rollout-model\r\n\r\n"
REFUSED = b'HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"error": {}}'
ENDLESS = b"HTTP/1.1 409 Conflict\r\nA: " + b"x" * MAX_HEAD_BYTES
LARGE = b"HTTP/1.1 409 Conflict\r\nContent-Length: 99999\r\n\r\n"


async def never(_request: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError("no request was sent")


async def attached(port: int, server: web.Server) -> ModelConnection:
    client = ExecutorClient(f"tcp:127.0.0.1:{port}", "token")
    return await client.attach("/workspaces/w/model", UPGRADE, lambda: ModelConnection(server))


async def taken_by(pieces: list[bytes]) -> bool:
    """Whether a request is taken from an executor that answers with these pieces and then closes the connection."""

    async def executor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(executor, "127.0.0.1", 0) as server:
        return await (await attached(server.sockets[0].getsockname()[1], web.Server(never))).taken


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_reply_of_the_executor_is_parsed_in_any_chunks(size: int) -> None:
    assert not await taken_by([SWITCHED[n : n + size] for n in range(0, len(SWITCHED), size)])
    with pytest.raises(SandboxFailure, match="status 409"):
        await taken_by([REFUSED[n : n + size] for n in range(0, len(REFUSED), size)])


@pytest.mark.parametrize("reply", [b"", b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", REFUSED[:-1], ENDLESS, LARGE])
async def test_invalid_reply_ends_the_connection_without_a_hang(reply: bytes) -> None:
    with pytest.raises(OSError, match=r"(?i)clos|reset|not HTTP|more than"):
        await taken_by([reply])


async def test_large_request_that_arrives_with_the_reply_is_served() -> None:
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def executor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            SWITCHED
            + b"POST / HTTP/1.1\r\nHost: m\r\nConnection: close\r\nContent-Length: 500000\r\n\r\n"
            + b"x" * 500_000
        )
        answers.put_nowait(await reader.read())
        writer.close()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=f"{len(await request.read())} bytes")

    async with await asyncio.start_server(executor, "127.0.0.1", 0) as server:
        connection = await attached(server.sockets[0].getsockname()[1], web.Server(answer))
        assert await connection.taken
        assert (await answers.get()).endswith(b"500000 bytes")
