"""Resuming a job of 100,000 rollouts from S3 with 30 ms latency: seconds until the first rollout runs, and peak memory.
Then the same figures for the end of that job, when its results and statistics are written.
"""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from agent_runtime.recording.results import result_line
from agent_runtime.recording.seals import ENTRIES, INDEX
from agent_runtime.recording.segments import compress, json_bytes
from benchmarks.conversation import Subject
from benchmarks.jobs import SAYS_DONE, rollout_job, tasks_in
from benchmarks.measuring import memory_folder
from benchmarks.report import Row, Target
from benchmarks.slow_link import slow_link
from rollout_api.records import CommandVerdict, Outcome, Result, Seal, StopReason, Usage, Verdict
from tests.support.s3 import BUCKET, S3, serve_s3

SEALED = 100_000
GROUP_SIZE = 8
LEFT = 800  # rollouts that are left to do
DISTANCE_SECONDS = 0.03
MOST_SECONDS = 60
MOST_BYTES = 500e6
ENGINE = "benchmarks.subjects.engine"


def measure() -> list[Row]:
    """Return seconds and bytes of the resume and of the end."""
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    with memory_folder() as folder, serve_s3(within=folder) as s3:
        tasks = tasks_in(folder / "tasks.jsonl", _groups())
        job = rollout_job(s3.uri("large"), tasks=tasks, model=SAYS_DONE, group_size=GROUP_SIZE).wire()
        await _run_job(job, s3, s3.port, stop_after=1)
        [run] = folder.glob(f"versitygw-*/{BUCKET}/large/benchmark-*")
        _write_remains(run)
        async with slow_link(s3.port, DISTANCE_SECONDS) as port:
            resumed = await _run_job(job, s3, port, stop_after=1)
            ended = await _run_job(job, s3, port, stop_after=None)
    assert ended["sealed_before"] + ended["sealed"] == _groups() * GROUP_SIZE
    return [
        Row(f"{SEALED:,} sealed", resumed["first_rollout_seconds"], "s", target=Target("at most", MOST_SECONDS)),
        Row("most memory", resumed["peak_bytes"] / 1e6, "MB", target=Target("at most", MOST_BYTES / 1e6)),
        Row(f"resume, {LEFT} rollouts, end", ended["wall_seconds"], "s"),
        Row("most memory", ended["peak_bytes"] / 1e6, "MB", target=Target("at most", MOST_BYTES / 1e6)),
    ]


def _groups() -> int:
    return (SEALED + LEFT) // GROUP_SIZE


async def _run_job(job: dict[str, Any], s3: S3, port: int, *, stop_after: int | None) -> dict[str, Any]:
    with Subject(ENGINE) as runner:  # asked in another thread, because this one serves the slow link
        return await asyncio.to_thread(runner.ask, job=job, environ=s3.environ(port), stop_after=stop_after)


def _write_remains(run: Path) -> None:
    """Write the files that killed runners leave after they have sealed SEALED rollouts."""
    for folder in ("seals", INDEX):
        (run / folder).mkdir(exist_ok=True)
    entries: list[bytes] = []
    for index in range(SEALED):
        path = run / f"seals/{index}.json"
        if path.exists():
            continue
        seal = _seal(index)
        path.write_bytes(json_bytes(seal))
        attempt = run / f"attempts/{index}/0"
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / "0.epoch").write_bytes(b"{}")
        entries.append(result_line(seal.result))
        if len(entries) == ENTRIES:
            data = compress(b"".join(entries))
            (run / INDEX / f"{hashlib.sha256(data).hexdigest()}.jsonl.zst").write_bytes(data)
            entries = []


def _seal(index: int) -> Seal:
    group, member = divmod(index, GROUP_SIZE)
    result = Result(
        index=index,
        group=group,
        member=member,
        task=f"task-{group:06}",
        mode="Eval",
        seed=index,
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.FINISHED,
        message="The agent said that it is done. " * 10,
        reward=float(index % 3 == 0),
        passed=index % 3 == 0,
        attempt=0,
        seconds=dict.fromkeys(("boot", "agent", "model", "tools", "verifier", "total"), index % 97 / 7),
        turns=10,
        tool_calls=10,
        usage=Usage(prompt_tokens=40_000, completion_tokens=4_000),
        sandbox={"provider": "cluster", "mode": "Overlay", "modeReason": None, "root": "image"},
    )
    command = CommandVerdict(command="python -m pytest -q", exit_code=0, seconds=1.0, output="test passed\n" * 160)
    return Seal(result=result, verdict=Verdict(reward=1.0, passed=True, commands=[command]), objects=[])
