"""The servers of one ModelServer, kept as its status says, and looked at on our own account."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelError
from agent_runtime.models.pool.admission_queue import Places
from agent_runtime.models.pool.directory import Directory, View
from agent_runtime.models.pool.gate import PolicyGate
from agent_runtime.models.pool.load import LoadReader
from agent_runtime.models.pool.server import Engine, Server, identity
from agent_runtime.models.pool.stall_detector import STALL_SECONDS
from rollout_api.model_server import ServerState, ServerStatus

LOOK_SECONDS = 0.1
"""Between two looks at streams and gate; what they judge is counted in seconds."""
PROBE_SECONDS = 5.0
"""Between two looks at a server that calls were taken away from."""
ANSWER_SECONDS = 30.0
"""For its few tokens, if it is well and busy."""
EMPTY_SECONDS = 2700.0
"""Without a server that can be asked: as long as the slowest start of one may take (its start-up probe, 45 min)."""


class Fleet:
    """Follows a directory: who is a member, whether the gate is open, and which member can be asked.

    `on_gate` hears of the gate's opening and shutting, `on_look` of the time, ten times a second.
    """

    def __init__(
        self,
        directory: Directory,
        connect: Callable[[str], Engine],
        *,
        me: str,
        sample_seconds: float,
        on_gate: Callable[[bool], None],
        on_look: Callable[[float], None],
        on_acknowledged: Callable[[], None],
    ) -> None:
        self.places, self.gate = Places(), PolicyGate(me)
        self.token_capture: str | None = None
        """How all servers record token ids; None before one was asked."""
        self._directory, self._connect, self._sample_seconds = directory, connect, sample_seconds
        self._on_gate, self._on_look, self._on_acknowledged = on_gate, on_look, on_acknowledged
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
            self._spawn(self._look())

    async def close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for server in self.places.servers.values():
            await server.engine.close()
        await self._reader.close()

    async def news(self, within_seconds: float) -> None:
        """Return when the directory has said something, or after so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), within_seconds)

    def raise_failure(self) -> None:
        """Raise what ended the work here: nobody would ever be let in."""
        if self._failure is not None:
            raise self._failure

    async def _follow(self) -> None:
        async for view in self._directory.changes():
            self._see(view)

    def _see(self, view: View) -> None:
        was_open = self.gate.is_open
        self.gate.see(view.status.policy, view.as_of)
        self.places.is_open = is_open = self.gate.is_open
        self._renew(view.status.servers)
        if was_open != is_open:
            self._on_gate(is_open)
        if not is_open and self._shut_at is None:
            self._shut_at = time.monotonic()
        elif is_open and self._shut_at is not None:
            self._shut_before, self._shut_at = self.gate_seconds, None
        self.places.admit()
        self._news.set()
        self._news = asyncio.Event()

    def _renew(self, statuses: Sequence[ServerStatus]) -> None:
        """Take over who is a member. One that is not ready gets no calls, and keeps those that it has."""
        listed = {status.name: status for status in statuses if status.state is not ServerState.EVICTED}
        for name, server in list(self.places.servers.items()):
            status = listed.get(name)
            if status is None:
                self._remove(server, "it has left the ModelServer")
            elif identity(status) != server.identity:
                server.restarted = server.restarted or status.uid == server.uid
                self._remove(server, "it was started again")
            else:
                server.is_ready = status.ready
        for name, status in listed.items():
            if status.ready and name not in self.places.servers:
                self._add(status)

    def _add(self, status: ServerStatus) -> None:
        engine = self._connect(status.url)
        if self.token_capture is not None:
            engine.token_capture = self.token_capture
        server = self.places.servers[status.name] = Server(status, engine)
        self._minders[status.name] = self._spawn(self._mind(server))

    def _remove(self, server: Server, why: str) -> None:
        del self.places.servers[server.name]
        self._minders.pop(server.name).cancel()
        server.leave(why)
        self._spawn(self._retire(server))

    async def _retire(self, server: Server) -> None:
        try:
            await asyncio.sleep(LOOK_SECONDS)  # its calls have been told
        finally:
            await server.engine.close()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            if self.gate.acknowledges(now):
                self._on_acknowledged()
            can_be_judged = self.gate.is_open and now <= self.gate.good_until
            for server in self.places.servers.values():
                if server.pulse.is_stalled(now, in_flight=server.in_flight, can_be_judged=can_be_judged):
                    server.leave(f"{server.name} has made no token for {STALL_SECONDS:g} s")
            self.places.admit()
            self._refuse_where_empty(now)
            self._on_look(now)

    def _refuse_where_empty(self, now: float) -> None:
        if not self.places.is_open or self.places.can_be_asked:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        elif now - self._empty_since > EMPTY_SECONDS:
            why = (
                ", ".join(f"{server.name}: {server.away}" for server in self.places.servers.values()) or "none is ready"
            )
            self.places.refuse(
                ModelError("NoServer", f"the ModelServer had no server to ask for {EMPTY_SECONDS:g} s ({why})")
            )

    async def _mind(self, server: Server) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                pause = self._sample_seconds if server.away is None else PROBE_SECONDS
                await asyncio.wait_for(server.look.wait(), pause)
            server.look.clear()
            if not self.places.is_open:
                continue
            if server.away is not None:
                await self._probe(server)
            elif server.in_flight and (load := await self._reader.read(server.url)) is not None:
                server.read(load)
                if server.restarted:
                    server.leave(f"the engine of {server.name} was started again")
            self.places.admit()

    async def _probe(self, server: Server) -> None:
        """Whether it answers again. One whose engine was started anew waits for its policy, and for a new status."""
        if (load := await self._reader.read(server.url)) is not None:
            server.read(load)
        if server.restarted:
            return
        with contextlib.suppress(TimeoutError, ModelError, ContextExceeded, ContentFiltered):
            async with asyncio.timeout(ANSWER_SECONDS):
                await server.engine.check()
            if self.token_capture in (None, server.engine.token_capture):
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
            self.places.refuse(self._failure)
