"""The calls that wait, and the server that each one gets: in the order in which they came, as soon as there is a place."""

import asyncio
from collections import deque
from collections.abc import Set
from dataclasses import dataclass

from agent_runtime.models.served.routing import choose, preference
from agent_runtime.models.served.server import Server


@dataclass(eq=False, slots=True)
class _Waiting:
    group: str
    avoided: Set[str]
    place: asyncio.Future[Server]


class Places:
    """Servers by name, and the calls that wait for one of them."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.is_open = False
        """Whether calls may start at all."""
        self.spills = 0
        """Calls that did not go to the first server of their group."""
        self._waiting: deque[_Waiting] = deque()

    @property
    def can_be_asked(self) -> list[Server]:
        """Servers that calls may be sent to."""
        return [server for server in self.servers.values() if server.can_be_asked]

    @property
    def waiting(self) -> int:
        """Calls without a place."""
        return len(self._waiting)

    async def take(self, group: str, avoided: Set[str]) -> Server:
        """A place for a call of that group, not at `avoided` where another one will do. `give_back` it."""
        if not self._waiting and (server := self._place(group, avoided)) is not None:
            return server
        waiting = _Waiting(group, avoided, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled() and waiting.place.exception() is None:
                self.give_back(waiting.place.result())
            raise

    def give_back(self, server: Server) -> None:
        """The call is over."""
        server.in_flight -= 1
        self.admit()

    def admit(self) -> None:
        """Give places to those who wait; to be called whenever one may have become free."""
        while self._waiting:
            first = self._waiting[0]
            if not first.place.done():
                server = self._place(first.group, first.avoided)
                if server is None:
                    return
                first.place.set_result(server)
            self._waiting.popleft()

    def refuse(self, error: Exception) -> None:
        """Nobody who waits will get a place."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.place.done():
                waiting.place.set_exception(error)

    def _place(self, group: str, avoided: Set[str]) -> Server | None:
        if not self.is_open:
            return None
        able = {server.name: server for server in self.can_be_asked}
        wanted = {name: server for name, server in able.items() if name not in avoided} or able
        name = choose(
            group,
            {name: server.in_flight for name, server in wanted.items()},
            {name: int(server.limit) for name, server in wanted.items()},
        )
        if name is None:
            return None
        self.spills += name != preference(group, self.servers)[0]
        server = able[name]
        server.in_flight += 1
        return server
