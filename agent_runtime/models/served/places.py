"""Calls that wait for a place at a server, and their places."""

import asyncio
from collections.abc import Set

from agent_runtime.models.served.routing import preference
from agent_runtime.models.served.server import Server
from agent_runtime.models.served.waiting import Waiting, WaitingCalls


class Places:
    """Servers by name, and the calls that wait for one of them."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.is_open = False
        """Whether calls may start at all."""
        self.spills = 0
        """Calls that did not go to the first server of their group."""
        self._waiting = WaitingCalls()
        self._places: dict[Waiting, asyncio.Future[Server]] = {}
        """Of the calls that wait."""

    @property
    def can_be_asked(self) -> list[Server]:
        """Servers that calls may be sent to."""
        return [server for server in self.servers.values() if server.can_be_asked]

    @property
    def waiting(self) -> int:
        """Calls without a place."""
        return len(self._places)

    async def take(self, group: str, avoided: Set[str]) -> Server:
        """A place for a call of that group, not at `avoided` where another one will do. `give_back` it."""
        loop = asyncio.get_running_loop()
        call, place = Waiting(group, frozenset(avoided), loop.time()), asyncio.Future[Server](loop=loop)
        self._waiting.add(call)
        self._places[call] = place
        self.admit()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.give_back(place.result())
            elif self._places.pop(call, None) is not None:
                self._waiting.remove(call)
            raise

    def give_back(self, server: Server) -> None:
        """The call is over."""
        server.in_flight -= 1
        self.admit()

    def admit(self) -> None:
        """Give places to those who wait; to be called whenever one may have become free, and several times a second."""
        if not self.is_open or not self._places:
            return
        able = self.can_be_asked
        in_flight = {server.name: server.in_flight for server in able}
        limits = {server.name: int(server.limit) for server in able}
        now = asyncio.get_running_loop().time()
        while (found := self._waiting.next(in_flight, limits, now)) is not None:
            call, name = found
            place = self._places.pop(call)
            if place.done():
                continue
            in_flight[name] += 1
            self.servers[name].in_flight += 1
            self.spills += name != preference(call.group, self.servers)[0]
            place.set_result(self.servers[name])

    def refuse(self, error: Exception) -> None:
        """Nobody who waits will get a place."""
        for call, place in self._places.items():
            self._waiting.remove(call)
            if not place.done():
                place.set_exception(error)
        self._places.clear()
