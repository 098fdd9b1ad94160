"""The cost of recording for a rollout whose model takes a second for each turn: the same job with and without its
journal.
"""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.conversation import Subject
from benchmarks.instant_model import instant_model
from benchmarks.jobs import endpoint, inline_tasks, rollout_job
from benchmarks.report import Row, Target, comparison
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import serve_s3

ROLLOUTS = 32  # concurrent: enough for simultaneous requests to the store, too few to use a whole core
TURNS = 8
TURN_SECONDS = 1.0
REQUEST_SECONDS = 0.03  # latency of a write to S3 in the same region is 20 to 40 ms
MOST = 1.05  # largest allowed ratio to a turn without its journal
ENGINE = "benchmarks.subjects.engine"


@dataclass(frozen=True)
class _Turns:
    """One run: mean seconds from one turn's answer to the next one's, number of turns, and requests to the store."""

    seconds: float
    turns: int
    requests: int


def measure() -> list[Row]:
    """Return the seconds of a turn with and without its journal on each store, and the requests of a turn."""
    with instant_model(TURNS, delay_seconds=TURN_SECONDS) as base_url:
        folder = asyncio.run(_on_folder(base_url))
        bucket = asyncio.run(_on_s3(base_url))
    bare, journaled = bucket
    return [
        _overhead("a local folder", *folder),
        _overhead(f"S3 at {REQUEST_SECONDS * 1e3:g} ms a request", *bucket),
        Row("requests to S3 of a turn's journal", (journaled.requests - bare.requests) / journaled.turns, "requests"),
    ]


def _overhead(store: str, bare: _Turns, journaled: _Turns) -> Row:
    what = f"a turn of {TURN_SECONDS:g} s, journaled on {store}"
    return comparison(what, journaled.seconds, "s", "not journaled", bare.seconds, Target("at most", MOST))


async def _on_folder(base_url: str) -> tuple[_Turns, _Turns]:
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        return await _without_and_with(base_url, folder, {}, None)


async def _on_s3(base_url: str) -> tuple[_Turns, _Turns]:
    with serve_s3() as s3:
        async with FaultProxy(upstream=s3.port, delay_seconds=REQUEST_SECONDS).serve() as proxy:
            return await _without_and_with(base_url, s3.uri("benchmark"), s3.environ(proxy.port), proxy)


async def _without_and_with(
    base_url: str, output: str, environ: Mapping[str, str], proxy: FaultProxy | None
) -> tuple[_Turns, _Turns]:
    found = []
    with Subject(ENGINE) as subject:
        for journal in (False, True):
            job = rollout_job(f"{output}/{journal}", tasks=inline_tasks(ROLLOUTS), model=endpoint(base_url)).wire()
            requests = -_requests(proxy)
            # In another thread, because this one serves the proxy.
            cost: dict[str, Any] = await asyncio.to_thread(subject.ask, job=job, environ=dict(environ), journal=journal)
            requests += _requests(proxy)
            found.append(_Turns(cost["turn_seconds"], cost["turns"], requests))
    bare, journaled = found
    return bare, journaled


def _requests(proxy: FaultProxy | None) -> int:
    return 0 if proxy is None else proxy.seen.total()
