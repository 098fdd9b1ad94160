"""The engine (inference server) behind a gateway: its current process, and its verified policy version. A restarted
process has lost its policy, but has the same address. So the gateway keeps an idle connection to the process. Servers
do not close such a connection (uvicorn and aiohttp count idle time only after the first answer), and the kernel closes
it when the process ends, before another process can listen. The gateway checks this socket at each request, so it
detects every restart.
"""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from yarl import URL

from rollout_api.inference.description import Description
from rollout_api.inference.vllm import VLLM

CONNECT_SECONDS: Final = 5.0
"""Time limit for a connection to a port of the same pod, which either listens or does not."""


class Engine:
    """Closed for calls until `open`, and again after its process has ended or `close_gate` was called."""

    def __init__(self, url: str, description: Description = VLLM) -> None:
        self.url, self.description = url.rstrip("/"), description
        self._connection: socket.socket | None = None
        self._process = ""
        self._version: int | None = None
        self.was_open = False
        """Whether calls have been allowed since this gateway started."""
        self._calls: set[object] = set()
        self._finding = asyncio.Lock()

    @property
    def process(self) -> str | None:
        """Return a generated name of the running process; None if there is none, or it has ended."""
        if self._connection is None:
            return None
        try:
            # No request is sent on this connection, so it only becomes readable when the peer closes it.
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process
        except OSError:
            pass
        self.close()
        return None

    @property
    def version(self) -> int | None:
        """Return the policy version with which calls may be answered; None while calls are not allowed."""
        return self._version if self.process is not None else None

    async def find(self) -> str | None:
        """Return the name of the process that listens now, as `process`."""
        async with self._finding:
            if self.process is None:
                self._connection = await _connected(self.url)
                self._process, self._calls = secrets.token_hex(8), set()
            return self.process

    @property
    def calls(self) -> int:
        """Return how many calls this process has in progress. No call begins while calls are not allowed."""
        return len(self._calls)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of the running process until it ends."""
        calls, call = self._calls, object()
        calls.add(call)
        try:
            yield
        finally:
            calls.remove(call)

    def open(self, process: str, version: int) -> bool:
        """Allow calls to this process, with this policy version. False if another process runs."""
        if self.process != process:
            return False
        self._version, self.was_open = version, True
        return True

    def close_gate(self) -> None:
        self._version = None

    def close(self) -> None:
        self.close_gate()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def _connected(url: str) -> socket.socket | None:
    address = URL(url)
    connection = socket.socket()
    connection.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
        # If no process listens on a port that the kernel chooses for this end, the socket connects to itself.
        if connection.getsockname() != connection.getpeername():
            return connection
    except OSError:
        pass
    connection.close()
    return None
