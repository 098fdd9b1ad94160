"""Sends requests over persistent HTTP/1.1 connections: at a fixed rate, from concurrent senders, or as streams.

It uses only asyncio's streams, because a client library would take more time than what is measured.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


class BadReply(Exception):
    """The status is not 200; the message has the response."""


@dataclass(frozen=True)
class Request:
    """A POST request. `url` must have host and port."""

    url: str
    body: bytes
    headers: Sequence[str] = ()

    def encoded(self) -> bytes:
        parts = urlsplit(self.url)
        head = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json", *self.headers]
        return "\r\n".join([*head, f"Content-Length: {len(self.body)}", "", ""]).encode() + self.body


class Connection:
    """A connection; the first request opens it."""

    def __init__(self) -> None:
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, request: Request) -> bytes:
        """Return the body of the answer. Raises BadReply."""
        return b"".join([piece async for piece in self.pieces(request)])

    async def pieces(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises BadReply."""
        reader, writer = await self._open(request.url)
        writer.write(request.encoded())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if (marker := head.find(b"content-length:")) >= 0:
            length = int(head[marker + 15 :].split(b"\r\n", 1)[0])
            yield (await reader.readexactly(length)) if length else b""
        else:
            while size := int(await reader.readline(), 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        status = head.split(b" ", 2)[1]
        if not status.startswith(b"2"):
            raise BadReply(f"{request.url} answers {status.decode()}")

    async def _open(self, url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            host, _, port = urlsplit(url).netloc.partition(":")
            self._streams = await asyncio.open_connection(host, int(port))
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Pool:
    """Idle connections, reused by later requests; it grows to the highest number in use at once."""

    def __init__(self) -> None:
        self._free: list[Connection] = []
        self._all: list[Connection] = []

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        if not self._free:
            self._free.append(Connection())
            self._all.append(self._free[-1])
        connection = self._free.pop()
        yield connection
        self._free.append(connection)

    def close(self) -> None:
        for connection in self._all:
            connection.close()


async def at_rate(requests: Sequence[Request], per_second: float) -> list[float]:
    """Return the seconds of each request from the moment at which it was due, so that delays by a slow server count.

    Open loop: a request is sent when it is due, even if earlier ones have no answer yet.
    """
    pool, clock = Pool(), time.perf_counter
    seconds: list[float] = []
    start = clock() + 0.1

    async def send(request: Request, due: float) -> None:
        async with pool.connection() as connection:
            await connection.post(request)
        seconds.append(clock() - due)

    sending = []
    for number, request in enumerate(requests):
        due = start + number / per_second
        if (pause := due - clock()) > 0:
            await asyncio.sleep(pause)
        sending.append(asyncio.ensure_future(send(request, due)))
    try:
        await asyncio.gather(*sending)
    finally:
        pool.close()
    return seconds


async def in_turns(requests: Sequence[Request], at_once: int) -> list[float]:
    """Return the seconds of each request; `at_once` connections send requests, each one after another."""
    waiting, seconds = iter(requests), list[float]()

    async def work() -> None:
        connection = Connection()
        try:
            for request in waiting:
                began = time.perf_counter()
                await connection.post(request)
                seconds.append(time.perf_counter() - began)
        finally:
            connection.close()

    await asyncio.gather(*(work() for _ in range(at_once)))
    return seconds


async def streams(requests: Sequence[Request], all_begun: Callable[[], None]) -> list[float]:
    """Return the seconds from each stream's request to its first piece; `all_begun` is called when all have one."""
    waiting, seconds = len(requests), list[float]()

    async def read(request: Request) -> None:
        nonlocal waiting
        connection, began, first = Connection(), time.perf_counter(), True
        try:
            async for _ in connection.pieces(request):
                if first:
                    first = False
                    seconds.append(time.perf_counter() - began)
                    waiting -= 1
                    if not waiting:
                        all_begun()
        finally:
            connection.close()

    await asyncio.gather(*(read(request) for request in requests))
    return seconds
