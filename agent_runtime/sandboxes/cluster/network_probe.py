"""Distinguishes an outage of the network from an executor that does not respond.

The kernel of a pod acknowledges probes of an open connection even if the executor hangs or its queue of connections is
full. So unacknowledged probes indicate a network outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

# TCP keep-alive: the first probe after IDLE_SECONDS of silence, then every PROBE_SECONDS; PROBES unacknowledged ones
# end the connection.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 5, 5, 6
# The executor closes a connection without a request after 300 s (executor/http/server.py); then another one is opened.
OPEN_SECONDS, PAUSE_SECONDS = 4.0, 1.0
_UNACKNOWLEDGED = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


class NetworkProbe:
    """One idle connection to an executor. `host` and `port` are those of its pod."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.is_cut_off = False
        """Whether probes were not acknowledged, and no connection could be opened since."""
        self._work = asyncio.create_task(self._follow())

    def stop(self) -> None:
        self._work.cancel()

    async def _follow(self) -> None:
        while True:
            # Ignore connections that cannot be opened: the policy may have filled the executor's queue.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(OPEN_SECONDS):
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                self.is_cut_off = False
                try:
                    _probe(writer.get_extra_info("socket"))
                    await reader.read(1)
                except OSError as error:
                    self.is_cut_off = error.errno in _UNACKNOWLEDGED
                finally:
                    writer.close()
            await asyncio.sleep(PAUSE_SECONDS)


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
