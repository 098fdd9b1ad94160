"""The connection to the executor, with any cuts of the network and any answers of a hostile sandbox."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.sandboxes.executor_client.connection import BrokenReply, Connection, Connections
from tests.support.full import examples

GET = b"GET / HTTP/1.1\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[tuple[Connections, list[int]]]:
    """Connect to a server; return a list with an entry for each opened connection."""
    opened: list[int] = []

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(len(opened))
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        server = await asyncio.start_unix_server(counted, path)

        async def connect() -> Connection:
            return (await asyncio.get_running_loop().create_unix_connection(Connection, path))[1]

        connections = Connections(connect)
        try:
            yield connections, opened
        finally:
            connections.close()
            server.close()


def says(*replies: Sequence[bytes]) -> Serve:
    """Return a server that answers one request after another with pieces, and disconnects."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for pieces in replies:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    return serve


async def ask(
    connections: Connections, head: bytes = GET, body: AsyncIterator[bytes] | None = None
) -> tuple[int, bytes]:
    status, _, reply = await connections.ask(head, body, 5)
    return status, reply


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


BODIES = st.binary(max_size=200)
PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@settings(max_examples=examples(40))
@given(body=BODIES, chunks=st.lists(st.binary(min_size=1, max_size=50), max_size=5), places=PLACES)
async def test_reply_is_complete_with_any_chunks(body: bytes, chunks: list[bytes], places: list[int]) -> None:
    plain = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    async with connected(says(cut(plain, places), cut(chunked, places))) as (connections, opened):
        assert await ask(connections) == (404, body)
        assert await ask(connections) == (200, b"".join(chunks))
        assert len(opened) == 1


@settings(max_examples=examples(40))
@given(length=st.integers(0, 80))
async def test_interrupted_reply_is_never_complete(length: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    async with connected(says([whole[: min(length, len(whole) - 1)]])) as (connections, _):
        with pytest.raises(ConnectionError):
            await connections.ask(GET, None, 5)


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nbody of no known length",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 1000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000,
    ],
)
async def test_sandbox_with_invalid_answers_is_lost_without_a_hang(reply: bytes) -> None:
    async with connected(says([reply])) as (connections, _):
        with pytest.raises(BrokenReply):
            await connections.ask(GET, None, 5)


async def test_silent_executor_is_abandoned() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
        await reader.read()

    async with connected(silent) as (connections, _):
        with pytest.raises(TimeoutError):
            await connections.ask(GET, None, 0.05)


async def test_unread_rest_of_a_reply_is_not_the_next_reply() -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    async with connected(says([reply], [reply])) as (connections, opened):
        async with connections.exchange(GET, None, 5) as (status, _, _):
            assert status == 200
        assert await ask(connections) == (200, b"hello")
        assert len(opened) == 2


async def test_refused_upload_ends_with_the_refusal() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nno!")
        await writer.drain()
        await reader.read()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0)

    async with connected(refuses) as (connections, opened):
        async with asyncio.timeout(5):
            assert await ask(connections, b"PUT / HTTP/1.1\r\n\r\n", endless()) == (413, b"no!")
        assert await ask(connections, b"PUT / HTTP/1.1\r\n\r\n", endless()) == (413, b"no!")
        assert len(opened) == 2
