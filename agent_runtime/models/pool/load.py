"""A server's load, from its `/metrics`.

Names and meaning: vLLM, vllm/v1/metrics/loggers.py. A server of several data-parallel engines has a line for each.
"""

import contextlib
from dataclasses import dataclass

import aiohttp

from agent_runtime.models.pool.admission import Pressure

KV_CACHE = "vllm:kv_cache_usage_perc"
WAITING = "vllm:num_requests_waiting"
PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")
"""Counters of which one increases while the engine works, also on a long prompt."""
READ_SECONDS = 5.0
"""Time limit of a reading. A server that exceeds it is read again later."""


@dataclass(frozen=True, slots=True)
class Load:
    """One reading."""

    pressure: Pressure
    progress: float
    """A number that changes with each step of the engine."""


def parse_load(text: str) -> Load | None:
    """Parse a page in Prometheus' text format leniently: missing values are 0. None if no line is vLLM's."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, labels, rest = line.partition("{")
        if labels:
            rest = rest.rpartition("}")[2]
        else:
            name, _, rest = line.partition(" ")
        if not name.startswith("vllm:"):
            continue
        with contextlib.suppress(ValueError, IndexError):
            value = float(rest.split()[0])  # a time stamp may follow
            found.setdefault(name, []).append(value)
    if not found:
        return None
    return Load(
        Pressure(max(found.get(KV_CACHE, [0.0])), sum(found.get(WAITING, [0.0]))),
        sum(sum(found.get(name, ())) for name in PROGRESS),
    )


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
