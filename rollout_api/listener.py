"""Listening sockets of servers that pods of other tenants can reach.

asyncio accepts any number of connections. Each takes a descriptor, and one with TLS takes 256 KiB, before a request
arrives. So idle connections of one pod could use up a server's descriptors or memory.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Final

MOST_CONNECTIONS: Final = 128
"""Most open connections of a listener. Scrapers, probes and API servers need a few each."""
MOST_OF_ADDRESS: Final = 32
"""Most open connections of one address."""
PAGE_SECONDS: Final = 1.0
"""Time for which a page of metrics is used again. Scrapers read one every few seconds."""


class LimitedListener(socket.socket):
    """A listening socket with a limited number of open connections. A connection above a limit closes the oldest one, so
    that idle connections cannot lock out others.
    """

    _open: dict[socket.socket, str]

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection, as asyncio does."""
        connection, address = super().accept()
        self._open = {other: host for other, host in self._open.items() if other.fileno() >= 0}
        self._open[connection] = address[0]
        of_address = [other for other, host in self._open.items() if host == address[0]]
        if len(of_address) > MOST_OF_ADDRESS:
            self._end(of_address[0])
        elif len(self._open) > MOST_CONNECTIONS:
            self._end(next(iter(self._open)))
        return connection, address

    def _end(self, connection: socket.socket) -> None:
        """End a connection. Its transport sees the end, and closes the socket."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def limited_listener(port: int) -> LimitedListener:
    """Return a listener on all addresses of this machine, IPv4 and IPv6. Port 0 means any free port."""
    dual = socket.has_dualstack_ipv6()
    listener = LimitedListener(socket.AF_INET6 if dual else socket.AF_INET)
    listener._open = {}
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("", port))
    return listener


def page_of(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """Return a function that returns the page of `make`, made at most once in PAGE_SECONDS: it takes tens of milliseconds of
    the event loop, and other tenants' pods may request it any number of times.
    """
    page, until = b"", 0.0

    def current() -> bytes:
        nonlocal page, until
        if (now := time.monotonic()) >= until:
            page, until = make(), now + PAGE_SECONDS
        return page

    return current
