"""The cost of recording, without running rollouts."""

import asyncio
import time
from dataclasses import dataclass

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.store import Store
from benchmarks.jobs import SAYS_DONE, inline_tasks, rollout_job
from benchmarks.measuring import Meter, memory_folder
from benchmarks.report import Row, percentile_rows
from rollout_api.records import Record, Usage
from tests.support.fault_proxy import FaultProxy
from tests.support.records import asked, call, completed, gave, said, told
from tests.support.s3 import serve_s3

TURNS = 100
DISTANCE_SECONDS = 0.03  # latency of a write to S3 in the same region is 20 to 40 ms
OUTPUT = "total 48\n" + "-rw-r--r-- 1 root root 4096 Jan  1 00:00 src/module.py\n" * 14  # 800 bytes, as of `ls -l`
COMMAND = '{"command": "python -m pytest -q tests/test_parser.py -k unicode 2>&1 | tail -n 30"}'


@dataclass(frozen=True)
class Cost:
    """Cost with one kind of storage. Requests are None if they are not counted."""

    append_seconds: list[float]
    cpu_seconds: float | None
    """Processor time of this process for an append; None if the proxy runs in this process too."""
    requests_a_turn: float | None
    requests_a_rollout: int | None
    """Requests of a rollout that belong to no turn: claim, start, trajectory, seal."""


def measure() -> list[Row]:
    """Return milliseconds of an append for each storage, and requests to S3."""
    rows: list[Row] = []
    for place, cost in asyncio.run(_all_places()).items():
        rows += percentile_rows(f"an append, {place}", cost.append_seconds)
        if cost.cpu_seconds is not None:
            rows.append(Row(f"processor time of an append, {place}", cost.cpu_seconds * 1e3, "ms"))
        if cost.requests_a_turn is not None and cost.requests_a_rollout is not None:
            rows.append(Row("requests of a turn", cost.requests_a_turn, "requests"))
            rows.append(Row("other requests of a rollout", cost.requests_a_rollout, "requests"))
    return rows


async def _all_places() -> dict[str, Cost]:
    with memory_folder() as folder, serve_s3() as s3:
        local = Store.open(str(folder), {})
        await _measure(local.below("warm-up"), 1, None)
        async with FaultProxy(s3.port, delay_seconds=DISTANCE_SECONDS).serve() as proxy:
            near = Store.open(s3.uri("near"), s3.environ())
            far = Store.open(s3.uri("far"), s3.environ(proxy.port))
            return {
                "folder in memory": await _measure(local, 20, None),
                "S3 on this machine": await _measure(near, 5, None),
                "S3, 30 ms away": await _measure(far, 1, proxy),
            }


async def _measure(store: Store, rollouts: int, proxy: FaultProxy | None) -> Cost:
    job = rollout_job("unused", tasks=inline_tasks(1), model=SAYS_DONE)
    record = await JobRecord.open(store, job, job.spec.tasks.inline or [])
    seconds: list[float] = []
    cpu = 0.0
    before = _requests(proxy)
    in_turns = 0
    for index in range(rollouts):
        journal = await Journal.claim(record, index, 0)
        await journal.begin()
        start = _requests(proxy)
        meter = Meter()
        records: list[Record] = []
        for turn in range(TURNS):
            for segment in _turn(turn):
                started = time.perf_counter()
                await journal.append(segment)
                seconds.append(time.perf_counter() - started)
                records += segment
        cpu += meter.read().cpu_seconds
        in_turns += _requests(proxy) - start
        await journal.seal(completed(index), None, records)
    besides = _requests(proxy) - before - in_turns
    return Cost(
        append_seconds=seconds,
        cpu_seconds=None if proxy else cpu / len(seconds),
        requests_a_turn=in_turns / rollouts / TURNS if proxy else None,
        requests_a_rollout=besides // rollouts if proxy else None,
    )


def _requests(proxy: FaultProxy | None) -> int:
    return sum(proxy.seen[method] for method in ("GET", "PUT", "POST", "HEAD", "DELETE")) if proxy else 0


def _turn(turn: int) -> tuple[list[Record], list[Record]]:
    """Return the two segments of a turn: the previous tools' results with this turn's intent, and the answer."""
    previous, now = f"call-{turn - 1}", time.time()
    answer = said(
        turn,
        "Let me run the tests.",
        call(f"call-{turn}", COMMAND),
        time=now,
        finish_reason="tool_calls",
        model="benchmark",
        usage=Usage(prompt_tokens=40 * turn, completion_tokens=40),
    )
    intent = asked(turn, 2 * turn + 1, told(previous, OUTPUT), time=now)
    return [gave(turn - 1, (previous, OUTPUT), time=now), intent], [answer]
