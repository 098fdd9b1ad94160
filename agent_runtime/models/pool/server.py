"""One server as seen by this runner: its running calls, and whether it is available."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, Unpack

from agent_runtime.models.base import Model, ModelReply, ModelRequest
from agent_runtime.models.pool.admission import INITIAL_CALLS, next_limit
from agent_runtime.models.pool.load import Load
from agent_runtime.models.pool.stall_detector import StallDetector
from agent_runtime.models.vllm.server import EngineOptions
from rollout_api.model_server import ServerStatus


class Engine(Model, Protocol):
    """The inference server at one URL (VllmServer)."""

    async def complete(self, request: ModelRequest, **engine: Unpack[EngineOptions]) -> ModelReply:
        """Return one answer, continued from `progress` if it has tokens already."""

    async def complete_prompt(
        self, prompt: str | Sequence[int], request: ModelRequest, **engine: Unpack[EngineOptions]
    ) -> ModelReply:
        """Return one completion of a bare prompt, like `complete`."""


class Server:
    """A member of the ModelServer. `away` is the reason why this runner sends it no calls; `is_ready` is from its
    status.
    """

    def __init__(self, status: ServerStatus, engine: Engine) -> None:
        self.name, self.uid, self.url, self.identity = status.name, status.uid, status.url, identity(status)
        self.engine = engine
        self.in_flight = 0
        self.limit = INITIAL_CALLS
        self.pulse = StallDetector()
        self.is_ready = status.ready
        self.away: str | None = None
        self.restarted = False
        """Whether its engine was restarted and has lost its policy. When its status reports that, it is replaced by
        another Server.
        """
        self.look = asyncio.Event()
        """Set to request a probe now."""
        self._steps = 0.0
        self.streams: set[asyncio.Timeout] = set()
        """Streams of its running calls, which `leave` ends."""

    @property
    def is_available(self) -> bool:
        return self.is_ready and self.away is None

    def read(self, load: Load) -> None:
        self.pulse.counted(load.progress)
        self.limit = next_limit(self.limit, self.in_flight, load.pressure)
        # Counters of an engine never decrease.
        self.restarted = self.restarted or load.progress < self._steps
        self._steps = load.progress

    def suspect(self, why: str) -> None:
        """Send it no new calls until it answers a probe; running calls continue."""
        if self.away is None:
            self.away = why
        self.look.set()

    def leave(self, why: str) -> None:
        """Remove the server and end its running calls, which are sent to other servers."""
        self.suspect(why)
        for stream in self.streams:
            stream.reschedule(0)


def identity(status: ServerStatus) -> tuple[object, ...]:
    """Return the server's identity. A new pod or a restarted engine has another one, because it has lost all state."""
    return status.uid, status.restarts, status.url
