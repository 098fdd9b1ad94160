"""One server as seen by this runner: its running calls, its load, whether it still produces tokens, and how many calls
this runner may have there.

The limit increases additively and decreases multiplicatively. A server with a full key-value cache preempts requests
and recomputes them later, whereas calls that wait here cause no load. Each runner decides independently, like senders
in a network. The load is from `/metrics`, by the names in `rollout_api/inference`. A server of several data-parallel
engines has a line for each. `/health` also returns 200 for a server that hangs (vllm#36960, gonka#1421).
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

import aiohttp

from agent_runtime.models.base import Model, ModelReply, ModelRequest
from agent_runtime.models.inference_client import EngineOptions
from rollout_api.inference.description import Metrics
from rollout_api.inference.engines import DESCRIPTIONS
from rollout_api.model_server import ServerStatus

INITIAL_CALLS = 32.0
"""A quarter of vLLM's smallest default `max_num_seqs`, so that a start overloads no server."""
FEWEST_CALLS = 1.0
"""Minimum, because a runner without calls would not detect that the load has ended."""
INCREASE_CALLS = 8.0
"""Increase for each sample, one a second: from the start to vLLM's default of 256 sequences in half a minute."""
GROW_BELOW, TRIM_ABOVE, HALVE_ABOVE = 0.6, 0.8, 0.9
"""Fractions of the cache in use: prime-rl's thresholds (`orchestrator/concurrency.py`; there the last one cancels
calls).
"""
TRIM, HALVE = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """One reading of a server's own metrics."""

    kv_cache_usage: float
    """Used part of the cache, from 0 to 1."""
    waiting: float
    """Waiting requests of all its clients."""


def next_limit(limit: float, in_flight: int, pressure: Pressure) -> float:
    """Return the limit after one more reading, given the previous limit and this runner's calls at the server.

    It only grows while calls wait for it; otherwise a quiet hour would allow any number of calls. It only shrinks when
    the number of calls is not above it: calls above an earlier limit will end soon.
    """
    if in_flight > limit:
        return limit
    if pressure.kv_cache_usage > HALVE_ABOVE:
        return max(FEWEST_CALLS, in_flight * HALVE)
    if pressure.kv_cache_usage > TRIM_ABOVE or pressure.waiting > in_flight:
        return max(FEWEST_CALLS, in_flight * TRIM)
    if pressure.kv_cache_usage < GROW_BELOW and pressure.waiting == 0 and in_flight >= int(limit):
        return limit + INCREASE_CALLS
    return limit


def refused_limit(limit: float, in_flight: int) -> float:
    """Return the limit after the server has refused a call as one too many (status 429)."""
    return max(FEWEST_CALLS, min(limit, in_flight) * HALVE)


READ_SECONDS = 5.0
"""Time limit of a reading. A server that exceeds it is read again later."""


@dataclass(frozen=True, slots=True)
class Load:
    """One reading."""

    pressure: Pressure
    progress: float
    """A number that changes with each step of the engine."""


def parse_load(text: str) -> Load | None:
    """Parse a page in Prometheus' text format leniently: missing values are 0. None if no line is an inference server's."""
    for described in DESCRIPTIONS.values():
        names = described.metrics
        if found := _values(text, names):
            return Load(
                Pressure(max(found.get(names.kv_cache_usage, [0.0])), sum(found.get(names.waiting, [0.0]))),
                sum(sum(found.get(name, ())) for name in names.progress),
            )
    return None


def _values(text: str, names: Metrics) -> dict[str, list[float]]:
    """Return the values of all of a server's metrics, by name without the prefix."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, labels, rest = line.partition("{")
        if labels:
            inner, _, rest = rest.rpartition("}")
            if names.totals not in inner:
                continue
        else:
            name, _, rest = line.partition(" ")
        if not name.startswith(names.prefix):
            continue
        with contextlib.suppress(ValueError, IndexError):
            value = float(rest.split()[0])  # a time stamp may follow
            found.setdefault(name.removeprefix(names.prefix), []).append(value)
    return found


class LoadReader:
    """Reads the metrics of any number of servers."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def read(self, url: str) -> Load | None:
        """Return the load of the server at that URL; None if it does not report any."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_SECONDS))
        try:
            async with self._session.get(f"{url.rstrip('/')}/metrics", allow_redirects=False) as response:
                return parse_load(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


LONGEST_STEP_SECONDS = 0.2
"""A longer time between two checks is not counted, because this process was stopped and has not read its input yet."""


class SilenceTimer:
    """Measures the time without tokens between checks."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def broken(self) -> None:
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        """Return the seconds of silence so far; call it several times a second."""
        if self._looked is not None:
            self._seconds += min(now - self._looked, LONGEST_STEP_SECONDS)
        self._looked = now
        return self._seconds


STALL_SECONDS = 60.0
"""Twice the longest time to a first token; far above a step of the slowest models."""


class StallDetector:
    """One server's activity: tokens on our own streams, and the token counters of its metrics.

    A server that works for other clients increases its counters, so it is not stalled. A paused server produces no
    tokens, so nothing is detected during an update, or if the state of an update is unknown.
    """

    def __init__(self) -> None:
        self._silence = SilenceTimer()
        self._counted: float | None = None

    def beat(self) -> None:
        self._silence.broken()

    def counted(self, tokens: float) -> None:
        """Record its metrics: all tokens that it has processed since its start."""
        if tokens != self._counted:
            self._silence.broken()
        self._counted = tokens

    def is_stalled(self, now: float, *, in_flight: int, can_be_judged: bool) -> bool:
        """Whether the server hangs, given the number of our calls at it; call it several times a second."""
        quiet = self._silence.seconds(now)
        if not in_flight or not can_be_judged:
            self._silence.broken()
            return False
        return quiet >= STALL_SECONDS


class Engine(Model, Protocol):
    """The inference server at one URL (`InferenceClient`)."""

    async def complete(self, request: ModelRequest, **engine: Unpack[EngineOptions]) -> ModelReply:
        """Return one answer, continued from `progress` if it has tokens already."""

    async def complete_prompt(
        self, prompt: str | Sequence[int], request: ModelRequest, **engine: Unpack[EngineOptions]
    ) -> ModelReply:
        """Return one completion of a bare prompt, like `complete`."""

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """Return the names of fields that the server ignores."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return the tokens of the rendered request; None if the server cannot count them."""


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
        """Send the server no new calls until it answers a probe; running calls continue."""
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
