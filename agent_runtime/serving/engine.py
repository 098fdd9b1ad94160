"""The engine behind a gateway: which of its processes runs, and which policy that one was verified to serve.

A process that is started again has lost its policy, and has the same address as the one before it. So the gateway keeps a
connection to it on which nothing is ever sent: no server ends such a one by itself (uvicorn and aiohttp count the time
between requests from the first answer), and the kernel ends it with the process, before another one can listen. Whether
it has ended is asked of the socket at each request, so no restart goes unseen, however busy the gateway is.
"""

import asyncio
import secrets
import socket
from typing import Final

from yarl import URL

CONNECT_SECONDS: Final = 5.0
"""To a port of the same pod: it listens or it does not."""


class Engine:
    """Shut until `open`, and again from the moment its process ends, or `shut`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connection: socket.socket | None = None
        self._process = ""
        self._version: int | None = None
        self._finding = asyncio.Lock()

    @property
    def process(self) -> str | None:
        """A name of the process that runs, made up here; None where none was found, or it has ended."""
        if self._connection is None:
            return None
        try:
            # Nothing is asked there, so nothing is said: whatever there is to read tells of an end.
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process
        except OSError:
            pass
        self.close()
        return None

    @property
    def version(self) -> int | None:
        """The policy that calls may be answered with; None: with none, it is shut."""
        return self._version if self.process is not None else None

    async def find(self) -> str | None:
        """The name of the process that listens now, as `process`."""
        async with self._finding:
            if self.process is None:
                self._connection = await _connected(self.url)
                self._process = secrets.token_hex(8)
            return self.process

    def open(self, process: str, version: int) -> bool:
        """Calls may be answered by this process, with this policy. False: it is not the one that runs."""
        if self.process != process:
            return False
        self._version = version
        return True

    def shut(self) -> None:
        self._version = None

    def close(self) -> None:
        self.shut()
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
        # A port that nobody listens on and that the kernel happens to choose for this end is connected to itself.
        if connection.getsockname() != connection.getpeername():
            return connection
    except OSError:
        pass
    connection.close()
    return None
