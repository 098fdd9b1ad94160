"""One server as this runner knows it: what it is doing there, and whether it may be asked."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, Unpack

from agent_runtime.models.base import Model, ModelReply, ModelRequest
from agent_runtime.models.pool.admission import INITIAL_CALLS, next_limit
from agent_runtime.models.pool.load import Load
from agent_runtime.models.pool.stall_detector import Pulse
from agent_runtime.models.vllm.server import EngineOptions
from rollout_api.model_server import ServerStatus


class Engine(Model, Protocol):
    """The one server that a URL stands for (VllmServer)."""

    async def complete(self, request: ModelRequest, **engine: Unpack[EngineOptions]) -> ModelReply:
        """One answer, continued from `progress` where it has tokens already."""

    async def complete_prompt(
        self, prompt: str | Sequence[int], request: ModelRequest, **engine: Unpack[EngineOptions]
    ) -> ModelReply:
        """One completion of a bare prompt, as `complete`."""


class Server:
    """A member of the ModelServer. `away` is why this runner sends no call there, `is_ready` what its status says."""

    def __init__(self, status: ServerStatus, engine: Engine) -> None:
        self.name, self.uid, self.url, self.identity = status.name, status.uid, status.url, identity(status)
        self.engine = engine
        self.in_flight = 0
        self.limit = INITIAL_CALLS
        self.pulse = Pulse()
        self.is_ready = status.ready
        self.away: str | None = None
        self.restarted = False
        """Its engine was started again: it has lost its policy, and is another server once its status says so."""
        self.look = asyncio.Event()
        """Set to have it looked at now."""
        self._steps = 0.0
        self.streams: set[asyncio.Timeout] = set()
        """Of the calls under way there, which `leave` ends."""

    @property
    def can_be_asked(self) -> bool:
        return self.is_ready and self.away is None

    def read(self, load: Load) -> None:
        self.pulse.counted(load.progress)
        self.limit = next_limit(self.limit, self.in_flight, load.pressure)
        # Counters only grow while an engine lives.
        self.restarted = self.restarted or load.progress < self._steps
        self._steps = load.progress

    def suspect(self, why: str) -> None:
        """Send no call there until it has shown that it answers; those under way may go on."""
        if self.away is None:
            self.away = why
        self.look.set()

    def leave(self, why: str) -> None:
        """End the calls under way there as well: they are sent elsewhere."""
        self.suspect(why)
        for stream in self.streams:
            stream.reschedule(0)


def identity(status: ServerStatus) -> tuple[object, ...]:
    """What makes it this server and no other: a new pod, or an engine that was started again, has nothing of the old."""
    return status.uid, status.restarts, status.url
