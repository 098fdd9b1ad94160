"""The servers of one ModelServer, updated from its status and this runner's observations."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_runtime.executor.timing import WorkingTime
from agent_runtime.models.base import TOKEN_CAPTURES, ContentFiltered, ContextExceeded, ModelError
from agent_runtime.models.pool.admission_queue import Places
from agent_runtime.models.pool.gate import PolicyGate
from agent_runtime.models.pool.server import STALL_SECONDS, Engine, LoadReader, Server, identity
from rollout_api.model_server import ModelServerStatus, ServerState, ServerStatus

CONFIRM_SECONDS = 3.0
"""A directory repeats its last status within this time, well below the lease (gate.py), so that one response may be
lost.
"""


@dataclass(frozen=True, slots=True)
class View:
    """A ModelServer's status at `as_of` (the event loop's time) or later."""

    status: ModelServerStatus
    as_of: float


class Directory(Protocol):
    """Follows one ModelServer."""

    def changes(self) -> AsyncIterator[View]:
        """Yield the status whenever it has changed, and every CONFIRM_SECONDS. It may be delayed, but is correct at its
        `as_of`.
        """


def for_adapter(status: ModelServerStatus, adapter: str) -> ModelServerStatus:
    """Return a status as calls to an adapter see it: its version, and the servers that have loaded that."""
    known = status.adapters.get(adapter)
    version = 0 if known is None else known.current
    servers = [
        server.model_copy(update={"ready": server.ready and server.adapters.get(adapter) == version})
        for server in status.servers
    ]
    return status.model_copy(
        update={"policy": status.policy.model_copy(update={"current": version}), "servers": servers}
    )


CHECK_SECONDS = 0.1
"""Interval of checks of streams and gate, whose limits are seconds."""
PROBE_SECONDS = 5.0
"""Interval of probes of a server that gets no calls after a failure."""
ANSWER_SECONDS = 30.0
"""Time limit of a probe, which a busy but healthy server can answer."""
EMPTY_SECONDS = 2700.0
"""Time limit without an available server: the longest start of one (its start-up probe, 45 min)."""


class Fleet:
    """Follows a directory: which servers are members, whether the gate is open, and which members are available."""

    def __init__(
        self,
        directory: Directory,
        connect: Callable[[str], Engine],
        *,
        me: str,
        sample_seconds: float,
        adapter: str | None = None,
    ) -> None:
        self.on_acknowledged: Callable[[], None] = lambda: None
        """Called when this runner acknowledges a policy update."""
        self._places, self._gate = Places(), PolicyGate(me, fixed=adapter is not None)
        self._adapter = adapter
        self._capture: str | None = None
        """How all servers record token ids; None before the first check."""
        self._directory, self._connect, self._sample_seconds = directory, connect, sample_seconds
        self._reader = LoadReader()
        self._work: set[asyncio.Task[None]] = set()
        self._minders: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._failure: ModelError | None = None
        self._shut_at: float | None = None
        self._shut_before = 0.0
        self._empty_since: float | None = None

    @property
    def gate_seconds(self) -> float:
        return self._shut_before + (0.0 if self._shut_at is None else time.monotonic() - self._shut_at)

    def start(self) -> None:
        if not self._work:
            self._spawn(self._follow())
            self._spawn(self._check())

    async def close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for server in self._places.servers.values():
            await server.engine.close()
        await self._reader.close()

    async def wait_for_status(self, within_seconds: float) -> None:
        """Return when the directory has reported, or after a time limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), within_seconds)

    def raise_failure(self) -> None:
        """Raise the error that stopped the background work, if any: without that work, calls cannot start."""
        if self._failure is not None:
            raise self._failure

    def _on_gate_change(self, is_open: bool) -> None:
        """Handle a change of the gate."""
        raise NotImplementedError

    def _end_silent_calls(self, now: float, stood_still: float) -> None:
        """End calls at servers that have stalled. Called ten times a second, with the seconds that this process has stood
        still since the last time, which are no silence.
        """
        raise NotImplementedError

    async def _follow(self) -> None:
        async for view in self._directory.changes():
            self._apply_view(view)

    def _apply_view(self, view: View) -> None:
        status = view.status if self._adapter is None else for_adapter(view.status, self._adapter)
        was_open = self._gate.is_open
        self._gate.see(status.policy, view.as_of)
        self._places.is_open = is_open = self._gate.is_open
        self._renew(status.servers)
        if was_open != is_open:
            self._on_gate_change(is_open)
        if not is_open and self._shut_at is None:
            self._shut_at = time.monotonic()
        elif is_open and self._shut_at is not None:
            self._shut_before, self._shut_at = self.gate_seconds, None
        self._places.admit()
        self._news.set()
        self._news = asyncio.Event()

    def _renew(self, statuses: Sequence[ServerStatus]) -> None:
        """Update the members from the status. A member that is not ready gets no new calls and keeps its running ones."""
        listed = {status.name: status for status in statuses if status.state is not ServerState.EVICTED}
        for name, server in list(self._places.servers.items()):
            status = listed.get(name)
            if status is None:
                self._remove(server, "it has left the ModelServer")
            elif identity(status) != server.identity:
                server.restarted = server.restarted or status.uid == server.uid
                self._remove(server, "it was restarted")
            else:
                server.is_ready = status.ready
        for name, status in listed.items():
            if status.ready and name not in self._places.servers:
                self._add(status)

    def _add(self, status: ServerStatus) -> None:
        engine = self._connect(status.url)
        if self._capture is not None:
            engine.token_capture = self._capture
        server = self._places.servers[status.name] = Server(status, engine)
        self._minders[status.name] = self._spawn(self._monitor(server))

    def _remove(self, server: Server, why: str) -> None:
        del self._places.servers[server.name]
        self._minders.pop(server.name).cancel()
        server.leave(why)
        self._spawn(self._retire(server))

    async def _retire(self, server: Server) -> None:
        try:
            await asyncio.sleep(CHECK_SECONDS)  # gives its calls time to end
        finally:
            await server.engine.close()

    async def _check(self) -> None:
        loop, clock = asyncio.get_running_loop(), WorkingTime()
        while True:
            before, working_before = loop.time(), clock()
            await asyncio.sleep(CHECK_SECONDS)
            now, working = loop.time(), clock()
            if self._gate.acknowledges(now):
                self.on_acknowledged()
            can_be_judged = self._gate.is_open and now <= self._gate.good_until
            for server in self._places.servers.values():
                if server.pulse.is_stalled(now, in_flight=server.in_flight, can_be_judged=can_be_judged):
                    server.leave(f"{server.name} has produced no token for {STALL_SECONDS:g} s")
            self._places.admit()
            self._refuse_where_empty(now)
            self._end_silent_calls(now, stood_still=now - before - (working - working_before))

    def _refuse_where_empty(self, now: float) -> None:
        if not self._places.is_open or self._places.available:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        elif now - self._empty_since > EMPTY_SECONDS:
            why = (
                ", ".join(f"{server.name}: {server.away}" for server in self._places.servers.values())
                or "none is ready"
            )
            self._places.refuse(
                ModelError("NoServer", f"the ModelServer had no available server for {EMPTY_SECONDS:g} s ({why})")
            )

    async def _monitor(self, server: Server) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                pause = self._sample_seconds if server.away is None else PROBE_SECONDS
                await asyncio.wait_for(server.look.wait(), pause)
            server.look.clear()
            if not self._places.is_open:
                continue
            if server.away is not None:
                await self._probe(server)
            elif server.in_flight and (load := await self._reader.read(server.url)) is not None:
                server.read(load)
                if server.restarted:
                    server.leave(f"the engine of {server.name} was restarted")
            self._places.admit()

    async def _probe(self, server: Server) -> None:
        """Probe a server that has failed. A server with a restarted engine waits for its policy and a new status."""
        if (load := await self._reader.read(server.url)) is not None:
            server.read(load)
        if server.restarted:
            return
        with contextlib.suppress(TimeoutError, ModelError, ContextExceeded, ContentFiltered):
            async with asyncio.timeout(ANSWER_SECONDS):
                await server.engine.check()
            found = server.engine.token_capture
            if self._capture is not None:
                # All servers record in the same way, also one that can do more than the server that was checked first.
                server.engine.token_capture = self._capture
            if self._capture is None or TOKEN_CAPTURES.index(found) >= TOKEN_CAPTURES.index(self._capture):
                server.away = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work_ended)
        return task

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = ModelError("Internal", f"following the ModelServer failed: {type(error).__name__}: {error}")
            self._places.refuse(self._failure)
