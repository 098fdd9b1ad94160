"""A connection with the latency of remote object storage: sent data arrives after a delay, in order.

It uses only asyncio's transports, because a proxy that parses requests would be slower than what is measured.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing


@asynccontextmanager
async def slow_link(port: int, seconds: float) -> AsyncIterator[int]:
    """Yield the port of a listener whose connections lead to `port` of this machine. Answers are not delayed."""
    loop = asyncio.get_running_loop()
    opened: set[asyncio.Task[None]] = set()

    def accepted(near: "_End") -> None:
        async def lead() -> None:
            _, far = await loop.create_connection(lambda: _End(0), "127.0.0.1", port)
            far.lead_to(near)
            near.lead_to(far)

        task = loop.create_task(lead())
        opened.add(task)  # the event loop holds no strong reference to a task
        task.add_done_callback(opened.discard)

    server = await loop.create_server(lambda: _End(seconds, accepted), "127.0.0.1", 0)
    # From Python 3.12 on, `async with` would wait until the last client has disconnected.
    with closing(server):
        yield server.sockets[0].getsockname()[1]


class _End(asyncio.Protocol):
    """One end of a connection: received data goes to the other end after `seconds`."""

    def __init__(self, seconds: float, accepted: "Callable[[_End], None] | None" = None) -> None:
        self._seconds, self._accepted = seconds, accepted
        self._other: _End | None = None
        self._early: list[Callable[[_End], None]] = []
        """Data received before the other end existed."""

    def lead_to(self, other: "_End") -> None:
        self._other = other
        for act in self._early:
            act(other)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._accepted is not None:
            self._accepted(self)

    def data_received(self, data: bytes) -> None:
        self._pass_on(lambda other: other.transport.write(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._pass_on(lambda other: other.transport.close())

    def _pass_on(self, act: "Callable[[_End], None]") -> None:
        if self._seconds:
            asyncio.get_running_loop().call_later(self._seconds, self._now, act)
        else:
            self._now(act)

    def _now(self, act: "Callable[[_End], None]") -> None:
        if self._other is None:
            self._early.append(act)
        else:
            act(self._other)
