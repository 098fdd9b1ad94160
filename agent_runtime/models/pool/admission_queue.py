"""Calls that wait for a place at a server, and the places.

A free place goes to a call whose group prefers that server, unless another call has waited much longer. With only the
order of arrival, a free place would go to any group, and soon every server would cache every prefix. This is delay
scheduling (Zaharia and others, EuroSys 2010): calls wait briefly for the preferred server.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from agent_runtime.models.pool.routing import choose, preference
from agent_runtime.models.pool.server import Server

IDLE_SECONDS = 1.0
"""Time for which a call waits for its preferred server while others are free: about the time to compute a prefix of
10,000 tokens.
"""
PASSED_SECONDS = 10.0
"""Calls at their preferred server precede other calls, unless those arrived this much earlier: about the duration of a
call.
"""


@dataclass(eq=False, slots=True)
class Waiting:
    """A waiting call. It is not sent to `avoided` if another server is available."""

    group: str
    avoided: frozenset[str]
    since: float


class WaitingCalls:
    """Calls that wait, each for its home: the first available server in its group's order.

    A call gets a free place at its home at once. After `idle` seconds, it also gets a place at another server if no
    call has that server as its home. It precedes calls with that home which arrived at least `passed` seconds later. So
    no call starves, and no usable place stays free for longer than `idle`. With both values 0, the order is that of
    arrival.
    """

    def __init__(self, idle: float = IDLE_SECONDS, passed: float = PASSED_SECONDS) -> None:
        self._idle, self._passed = idle, passed
        self._servers: Set[str] = frozenset()
        # By home and excluded servers: if the first call of a queue cannot be placed, no call of the queue can.
        self._queues: dict[tuple[str, Set[str]], OrderedDict[Waiting, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, call: Waiting) -> None:
        self._queues.setdefault(self._queue(call), OrderedDict())[call] = None

    def remove(self, call: Waiting) -> None:
        calls = self._queues.get(self._queue(call), OrderedDict())
        calls.pop(call, None)
        if not calls:
            self._queues.pop(self._queue(call), None)

    def next(self, in_flight: Mapping[str, int], limits: Mapping[str, int], now: float) -> tuple[Waiting, str] | None:
        """Return the next call to get a place, with its server, and remove it; None if all must wait.

        `in_flight` has this runner's calls at each available server, `limits` the most that each may have. Call this
        until it returns None, whenever a place may be free, and several times a second.
        """
        if in_flight.keys() != self._servers:
            self._sort_anew(frozenset(in_flight))
        free = {name for name, calls in in_flight.items() if calls < limits[name]}
        if not free:
            return None
        oldest = sorted(
            ((next(iter(calls)), home) for (home, _), calls in self._queues.items()), key=lambda head: head[0].since
        )
        came = next((call.since - self._passed for call, home in oldest if home in free), now - self._idle)
        for call, home in oldest:
            if home in free or call.since <= came:
                wanted = self._wanted(call)
                server = choose(call.group, {name: in_flight[name] for name in wanted}, limits)
                if server is not None:
                    self.remove(call)
                    return call, server
        return None

    def _wanted(self, call: Waiting) -> Collection[str]:
        return [name for name in self._servers if name not in call.avoided] or self._servers

    def _queue(self, call: Waiting) -> tuple[str, Set[str]]:
        home = preference(call.group, self._wanted(call))[0] if self._servers else ""
        return home, call.avoided

    def _sort_anew(self, servers: Set[str]) -> None:
        calls = sorted((call for calls in self._queues.values() for call in calls), key=lambda call: call.since)
        self._servers = servers
        self._queues = {}
        for call in calls:
            self.add(call)


class Places:
    """Servers by name, and the calls that wait for a place at one."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.is_open = False
        """Whether calls may start."""
        self.spills = 0
        """Calls that did not go to the first server of their group."""
        self._waiting = WaitingCalls()
        self._places: dict[Waiting, asyncio.Future[Server]] = {}
        """Places of waiting calls."""

    @property
    def available(self) -> list[Server]:
        return [server for server in self.servers.values() if server.is_available]

    @property
    def waiting(self) -> int:
        return len(self._places)

    async def take(self, group: str, avoided: Set[str]) -> Server:
        """Wait for a place for a call of that group, not at `avoided` if another server is available. Return it with
        `give_back`.
        """
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
        server.in_flight -= 1
        self.admit()

    def admit(self) -> None:
        """Give places to waiting calls. Call this whenever a place may be free, and several times a second."""
        if not self.is_open or not self._places:
            return
        able = self.available
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
        for call, place in self._places.items():
            self._waiting.remove(call)
            if not place.done():
                place.set_exception(error)
        self._places.clear()
